"""Where `resolve` differs from what vLLM 0.4.3 answered on a GPU of capability 8.0, and why. Tests and docs read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deviation:
    """One cell of the table: what the config says, what the user asks for, the old answer (None: an error), ours."""

    says: str
    user: str
    recorded: str | None
    ours: str
    reason: str


_ACCEPTED = "an explicit gptq_marlin was refused by a bug of 0.4.3 and 0.5.0; accepted since 0.6.6"
_OWN = "the file can only be what it is, so a name of the same family gives its own method"
_MISREAD = "0.4.3 took the file for plain GPTQ and failed while loading; later versions do so for gptq_marlin"

DEVIATIONS = (
    Deviation("gptq", "gptq_marlin", None, "gptq_marlin", _ACCEPTED),
    Deviation("gptq_v2", "gptq_marlin", None, "gptq_marlin", _ACCEPTED),
    Deviation("marlin", "gptq_marlin", None, "marlin", _OWN),
    Deviation("marlin_24", "gptq_marlin", None, "gptq_marlin_24", _OWN),
    Deviation("marlin_24", "marlin", "gptq_marlin", "gptq_marlin_24", _MISREAD),
    Deviation("marlin_24 without sym and desc_act", "gptq_marlin", None, "gptq_marlin_24", _OWN),
    Deviation("marlin_24 without sym and desc_act", "marlin", None, "gptq_marlin_24", _OWN),
)
