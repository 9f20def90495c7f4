"""This rank's shard of the parameters of one exchange, as flat segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from unidist.buffer import DType
from unidist_torch.memory import TORCH_DTYPES, tensor_of
from unidist_zero._torch.parameters.memory import ParameterMemory
from unidist_zero._torch.parameters.offload import StateMemory
from unidist_zero._torch.segments import SegmentTensor, form_of
from unidist_zero.sharding.partition import join_segments
from unidist_zero.sharding.reduce_scatter import ReduceScatterExchange


class ParameterShard:
    """The segments that this rank updates.

    Args:
        exchange: of the gradients.
        parameters: as numbered by the exchange.
        make_memory: moves the parameters to the memory in which their shards are updated.
        group_of: number of the optimizer's group, by number of the parameter.
        master_of: the type in which parameters of a type are updated.
        offload: where state, and copies that the optimizer steps on, are kept; None: beside the parameters.

    Attributes:
        forms: a tensor of each parameter's shape and memory order, without memory: at stage 3 the parameter itself has
            neither while it is not gathered.
        memory: holds the parameters.
        segments: this rank's.
    """

    def __init__(
        self,
        exchange: ReduceScatterExchange,
        parameters: Sequence[torch.Tensor],
        make_memory: Callable[[], ParameterMemory],
        group_of: Callable[[int], int],
        master_of: Callable[[DType], DType],
        offload: StateMemory | None = None,
    ) -> None:
        self.exchange = exchange
        self.parameters = parameters
        self.forms = [form_of(parameter) for parameter in parameters]
        self.memory = make_memory()
        self._offload = offload
        partition = exchange.partition
        self.segments: list[SegmentTensor] = []
        for number, cut in enumerate(partition.buckets):
            rank = exchange.shard_groups[cut.memory].communicator.rank
            pieces = [piece for piece in partition.pieces(rank) if piece.bucket == number]
            if not pieces:
                continue
            keys = [piece.parameter if partition.whole else group_of(piece.parameter) for piece in pieces]
            master = master_of(cut.dtype)
            own = self.memory.own(number)
            is_copied = offload is not None and not self.memory.is_offloaded and offload.is_away(own)
            for segment in join_segments(pieces, keys):
                begin = segment.offset - cut.begin(rank)
                self.segments.append(
                    SegmentTensor(
                        segment,
                        group_of(segment.pieces[0].parameter),
                        own[begin : begin + segment.count],
                        partial(_gradient, exchange, number, begin, segment.count),
                        form=self.forms[segment.pieces[0].parameter] if partition.whole else None,
                        master=None if master is cut.dtype else TORCH_DTYPES[master],
                        memory=offload,
                        is_copied=is_copied,
                    )
                )

    def device_of_state(self, parameter: torch.Tensor) -> torch.device:
        """Return the device on which a parameter's whole state is assembled when it is gathered."""
        return parameter.device if self._offload is None else torch.device("cpu")


def _gradient(exchange: ReduceScatterExchange, number: int, begin: int, count: int) -> torch.Tensor:
    """Return elements of this rank's shard of a bucket, `(count,)`, where they are now."""
    return tensor_of(exchange.shard(number))[begin : begin + count]
