"""Exchanges of a divided layer, as autograd functions. Every rank runs the same ones in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from unidist.errors import UsageError
from unidist.mesh import REPLICA_AXES
from unidist.runtime import context
from unidist_expert_parallel.layout.owners import AXIS
from unidist_torch.memory import buffer_of, memory_kind
from unidist_torch.operations import Sum, allreduce
from unidist_torch.operations.communicators import allreduced
from unidist_torch.operations.differentiable import apply_pair

if TYPE_CHECKING:
    from unidist.communicator import Communicator
    from unidist.runtime_api import RuntimeAPI


class ExpertAxis:
    """The ranks that divide the experts of a model, and all replicas of what is not divided. Creation is collective.

    Copies of a divided model (an average of the weights, say) share it; no file can hold it.

    Args:
        context: the runtime.
        kinds: kinds of memory that activations are in.

    Attributes:
        rank: of this rank on the axis.
        size: ranks on the axis.
        replica: of this rank among all that train on different tokens.
        num_replicas: number of those.
    """

    def __init__(self, context: RuntimeAPI, kinds: Iterable[str]) -> None:
        known = sorted({"host", *kinds})
        self._experts: dict[str, Communicator] = {kind: context.new_communicator(AXIS, memory=kind) for kind in known}
        self._replicas: dict[str, Communicator] = {
            kind: context.new_communicator(REPLICA_AXES, memory=kind) for kind in known
        }
        self.rank, self.size = self._experts["host"].rank, self._experts["host"].size
        self.replica, self.num_replicas = self._replicas["host"].rank, self._replicas["host"].size

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "the experts of this model are divided over the ranks (strategy expert), and torch.save(model) would write "
            "this rank's experts alone: use ud.save(path, model), which writes the whole model"
        )

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """Send each rank its part of `counts`, and return what the ranks have sent here, in rank order.

        Args:
            counts: as many for each rank of the axis.
        """
        each = len(counts) // self.size
        source = torch.tensor(counts, dtype=torch.int64)
        target = torch.empty_like(source)
        split = [each] * self.size
        work = self._experts["host"].alltoall(
            buffer_of(source), buffer_of(target), send_counts=split, receive_counts=split
        )
        work.wait()
        found: list[int] = target.tolist()
        return found

    def exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send each rank its rows, and return those from all ranks, in rank order; differentiable.

        Args:
            rows: `(sum(sent), width)`.
            sent: number of rows for each rank.
            received: number of rows from each rank.

        Returns:
            `(sum(received), width)`.
        """
        return apply_pair(
            rows,
            lambda value: self._moved(value, sent, received),
            lambda gradient: self._moved(gradient, received, sent),
        )

    def _moved(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        width = rows.shape[1]
        source = rows.contiguous()
        target = source.new_empty((sum(received), width))
        work = self._experts[_kind(rows)].alltoall(
            buffer_of(source),
            buffer_of(target),
            send_counts=[count * width for count in sent],
            receive_counts=[count * width for count in received],
        )
        work.wait()
        return target

    def gathered_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the counts of all replicas, `(num_replicas, *counts.shape)`; int64 in host memory."""
        target = counts.new_empty((self.num_replicas, *counts.shape))
        sizes = [counts.numel()] * self.num_replicas
        self._replicas["host"].allgather(buffer_of(counts.contiguous()), buffer_of(target), counts=sizes).wait()
        return target

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all replicas; the gradient is that of all replicas' losses, which depend on the sum."""
        return apply_pair(values, self._summed, self._summed)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        return allreduced(self._replicas[_kind(values)], values)


class Replicas:
    """The replicas of a model whose experts are whole on every rank, for the statistics of its routers.

    Ranks that have joined take part with nothing, where all ranks are replicas. A runtime has one, see `owned`.

    Args:
        context: the runtime.

    Attributes:
        replica: of this rank among all that train on different tokens.
        num_replicas: number of those.
    """

    def __init__(self, context: RuntimeAPI) -> None:
        self.replica, self.num_replicas = context.axis_rank(REPLICA_AXES), context.axis_size(REPLICA_AXES)
        self._context = context
        self._spans_world = self.num_replicas == context.topology.world_size
        self._communicators: dict[str, Communicator] = {}

    def gathered_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """See `ExpertAxis.gathered_counts`."""
        table = counts.new_zeros((self.num_replicas, *counts.shape))
        table[self.replica] = counts
        return self._summed(table)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """See `ExpertAxis.total`."""
        return apply_pair(values, self._summed, self._summed)

    def close(self) -> None:
        """See `unidist.runtime_api.Owned`: the runtime closes the communicators."""

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        if self._spans_world:
            return allreduce(values, op=Sum, name=f"statistics of routers {tuple(values.shape)}")
        kind = _kind(values)
        if kind not in self._communicators:
            self._communicators[kind] = self._context.new_communicator(REPLICA_AXES, memory=kind)
        return allreduced(self._communicators[kind], values)


def replicas_in_training() -> Replicas | None:
    """Return the replicas that a training by `distribute` or `TrainStep` averages over; None in any other process."""
    if not context.is_initialized():
        return None
    runtime = context.current()
    if not runtime.has_strategies or runtime.axis_size(REPLICA_AXES) == 1:
        return None
    return runtime.owned(Replicas)


def _kind(tensor: torch.Tensor) -> str:
    return memory_kind(tensor).partition(":")[0]
