"""Copies of sharded state in the memory of peers: a share survives the loss of the rank that holds it.

`memory` commits in two steps, `transfers` (pure) plans the transfers between ranks, `loading` executes them.
Imports `checkpoint`, `runtime` and the folders below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.elastic.peer.memory import PeerMemory, peers_of

__all__ = [
    "PeerMemory", "peers_of",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "memory": "PeerMemory peers_of",
    },
)
