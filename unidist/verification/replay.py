"""`--verify replay=N`: every N steps a rank computes its batch twice, and gets the same bits, or its machine is named.

A processor or memory that fails without an error gives wrong numbers that no comparison between ranks can find: they
compute different batches. Here each rank is compared with itself. All ranks do so in the same step, since they would
wait for one that does, and layers that communicate find each other.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist.errors import ReplayError
from unidist.negotiation import OperationKind, Request, allgather_object

if TYPE_CHECKING:
    from unidist.runtime.context import Context

_log = logging.getLogger("unidist")

_MOST_RANKS = 4
"""That a message lists."""

Digests = Callable[[], Mapping[str, bytes]]
"""Computes loss and gradients of this rank's batch, and returns a digest of each by name. Leaves no trace: random
generators, buffers and gradients are as before. Collective if layers of the model communicate."""


class _Differing(NamedTuple):
    """What was not the same on a rank.

    Args:
        host: of the rank.
        names: in the order in which they were computed.
    """

    host: str
    names: tuple[str, ...]


class Replay:
    """Compares the computations of one batch, on every rank of a runtime.

    Args:
        runtime: whose ranks and settings.

    Attributes:
        every: steps from one comparison to the next; 0: there are none.
        is_used: a `TrainStep` compares.
    """

    def __init__(self, runtime: Context) -> None:
        self._runtime = runtime
        self.every = runtime.settings.verify.replay
        self.is_used = False

    def is_due(self, step: int) -> bool:
        """Return whether the batch of this step, from 1, is computed twice before it is trained on."""
        return self.every > 0 and (step == 1 or step % self.every == 0)

    def compare(self, step: int, compute: Digests) -> None:
        """Compute a batch twice. Collective over all ranks.

        Raises:
            ReplayError: a rank found other bits. On every rank; names that rank and its host.
        """
        first, second = compute(), compute()
        names = [*first, *(name for name in second if name not in first)]
        differing = tuple(name for name in names if first.get(name) != second.get(name))
        if not self._is_anywhere(bool(differing)):
            return
        everyone: list[_Differing] = allgather_object(
            self._runtime.operations(), _Differing(socket.gethostname(), differing), name="verify replay"
        )
        raise ReplayError(_message(step, [(rank, each) for rank, each in enumerate(everyone) if each.names]))

    def _is_anywhere(self, is_here: bool) -> bool:
        """Return whether it is so on some rank; ranks that have joined take part with a zero."""
        flag = Buffer.allocate(1, DType.UINT8)
        flag.bytes()[0] = is_here
        request = Request("verify replay found", OperationKind.ALLREDUCE, flag, flag, (1,), ReduceOp.MAX)
        self._runtime.operations().submit(request).wait()
        return bool(flag.bytes()[0])

    def warn_if_unused(self, caller: str) -> None:
        """Warn on rank 0 that a loop of the script's own is not computed again."""
        if self.every and not self.is_used and self._runtime.topology.rank == 0:
            _log.warning(
                "--verify replay=%d: %s does not run the passes, so no batch is computed twice; TrainStep does",
                self.every,
                caller,
            )

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


def _message(step: int, found: list[tuple[int, _Differing]]) -> str:
    listed = "; ".join(
        f"rank {rank} on {each.host}: {each.names[0]}" + (f" and {len(each.names) - 1} more" if each.names[1:] else "")
        for rank, each in found[:_MOST_RANKS]
    )
    more = f"; and {len(found) - _MOST_RANKS} more ranks" if len(found) > _MOST_RANKS else ""
    return (
        f"step {step}: the same batch, computed twice with the same parameters and random numbers, did not give the "
        f"same bits ({listed}{more}). If it happens on one host alone, suspect its processor, accelerator or memory. "
        "If on all, an operation is not deterministic: docs/determinism.md says how to find it, and --verify first "
        "leaves this comparison out"
    )


__all__ = ["Digests", "Replay"]
