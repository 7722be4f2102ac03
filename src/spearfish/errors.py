"""Every error that spearfish raises on purpose. A user's mistake ends in one of these, never in a traceback."""


class SpearfishError(Exception):
    """Base of all errors below. The message names the tensor or layer, what came, what is wanted and the next step."""


class ShapeError(SpearfishError):
    """A tensor's shape or dtype does not fit what it is said to be."""


class FormatError(SpearfishError):
    """A file or config is damaged, contradicts itself, or holds what its format cannot hold."""


class UnsupportedError(SpearfishError):
    """Well-formed, but nothing here can do it. The message lists every reason."""


class QuantizationError(SpearfishError):
    """No quantisation method serves a config, or the one asked for does not fit it."""


class CompileError(SpearfishError):
    """A kernel did not compile. `folder` keeps source, command line and compiler log."""

    def __init__(self, message: str, folder: str = "") -> None:
        super().__init__(message)
        self.folder = folder


class OutOfMemoryError(SpearfishError, RuntimeError):
    """The GPU has no room. Nothing is lost: smaller work goes on. (A RuntimeError, which is what loops that look for
    the largest batch catch.)"""
