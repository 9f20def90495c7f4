"""This rank's share of the parameters of one exchange: flat memory for all of them, runs for its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unidist.buffer import DType
from unidist.timeline import Recorder
from unidist_torch.memory import TORCH_DTYPES, tensor_of
from unidist_torch.parameters import shaped
from unidist_zero._partition import Piece, join_runs
from unidist_zero._torch_runs import RunTensor
from unidist_zero.exchange import ReduceScatterExchange
from unidist_zero.gather import ShardGather


class ParameterShare:
    """The parameters of one exchange, moved to memory in which their shards can be gathered in place.

    Args:
        exchange: of their gradients.
        parameters: as numbered by the exchange. Their memory becomes part of the buckets' here; they stay the same
            objects with the same values.
        group_of: number of the optimizer's group, by number of the parameter.
        master_of: the type in which parameters of a type are updated.
        recorder: takes one event for each bucket that is gathered.
    """

    def __init__(
        self,
        exchange: ReduceScatterExchange,
        parameters: Sequence[torch.Tensor],
        group_of: Callable[[int], int],
        master_of: Callable[[DType], DType],
        recorder: Recorder,
    ) -> None:
        self.exchange = exchange
        self.parameters = parameters
        partition = exchange.partition
        memory = [exchange.allocate(cut.count, cut) for cut in partition.buckets]
        for index, (number, slot) in partition.places().items():
            _move(parameters[index], tensor_of(memory[number].slice(slot.offset, slot.count)))
        self._gather = ShardGather(partition, memory, exchange.lanes, recorder)
        self.runs: list[RunTensor] = []
        for number, cut in enumerate(partition.buckets):
            rank = exchange.lanes[cut.memory].shard.rank
            pieces = [piece for piece in partition.pieces(rank) if piece.bucket == number]
            keys = [piece.parameter if partition.whole else group_of(piece.parameter) for piece in pieces]
            master = master_of(cut.dtype)
            own, gradients = tensor_of(self._gather.own(number)), tensor_of(exchange.shard(number))
            for run in join_runs(pieces, keys):
                begin = run.offset - cut.begin(rank)
                self.runs.append(
                    RunTensor(
                        run,
                        group_of(run.pieces[0].parameter),
                        own[begin : begin + run.count],
                        gradients[begin : begin + run.count],
                        form=parameters[run.pieces[0].parameter] if partition.whole else None,
                        master=None if master is cut.dtype else TORCH_DTYPES[master],
                    )
                )

    def all_pieces(self) -> list[Piece]:
        """Return the pieces of every rank that shares."""
        return self.exchange.partition.all_pieces()

    def start_gathering(self) -> None:
        """Start to bring every rank's share to all."""
        for number in range(len(self.exchange.partition.buckets)):
            self._gather.post(number)

    def gather(self) -> None:
        """Return when all shares are there."""
        self._gather.wait()


def _move(parameter: torch.Tensor, flat: torch.Tensor) -> None:
    """Let a parameter have its values in other memory."""
    with torch.no_grad():
        place = shaped(flat, parameter)
        place.copy_(parameter)
        parameter.data = place
