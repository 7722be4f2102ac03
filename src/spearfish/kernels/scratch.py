"""Global memory in which the blocks of one launch leave partial sums for each other, and the flags that say so."""

from __future__ import annotations

import itertools
import secrets
from functools import partial

import torch

# A flag is raised with a ticket that no call had before, from a random start: so even flags in memory that was never
# cleared (inside a graph) cannot be taken for raised ones.
next_ticket = partial(next, itertools.count(secrets.randbits(62) + 1))

_workspaces: dict[tuple[int, int], torch.Tensor] = {}


def workspace(device: int, size: int, stream: int) -> torch.Tensor:
    """uint8 [>= size] for one launch on `stream`, torch's current one; every launch leaves its flags cleared.

    One for each stream, grown when needed: launches of one stream follow each other. A graph gets its own from its
    own pool, since it may be replayed on any stream.
    """
    if torch._C._cuda_isCurrentStreamCapturing():
        return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
    found = _workspaces.get((device, stream))
    if found is None or found.numel() < size:
        found = _workspaces[device, stream] = torch.zeros(
            max(size, 1 << 20), dtype=torch.uint8, device=f"cuda:{device}"
        )
    return found
