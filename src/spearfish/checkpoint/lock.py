"""One process at a time writes a folder. The system drops the lock when its process dies, however it dies."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from spearfish.errors import SpearfishError

try:
    import fcntl
except ImportError:  # Windows; nothing is locked there
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("spearfish")


class Lock:
    """Holds a lock on `file`, which is made for it and removed afterwards, from `acquire` to `release`.

    busy: the message of the SpearfishError for whoever comes second.
    """

    def __init__(self, file: Path, busy: str) -> None:
        self.file = file
        self.busy = busy
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Raises SpearfishError at once if another process, or another part of this one, holds the lock."""
        if fcntl is None:
            return
        while True:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(descriptor)
                raise SpearfishError(self.busy) from error
            except OSError as error:
                # Some network file systems know no locks. Working there without one beats not working there.
                os.close(descriptor)
                log.warning("%s cannot be locked (%s); let only one process write there", self.file, error.strerror)
                return
            if self._is_still(descriptor):
                self._descriptor = descriptor
                return
            os.close(descriptor)  # its holder removed it between our opening and locking it

    def _is_still(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.file.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Give the lock back; may be called again. The file goes first: whoever opens it later makes a new one."""
        if self._descriptor is not None:
            self.file.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None
