"""Gradients of parameters that several ranks of a pipeline hold, such as an embedding that is the output layer too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unidist.buffer import HOST, Buffer
from unidist.communicator import ReduceOp, Work
from unidist_pipeline.execution.rank import PipelineRank
from unidist_torch.memory import buffer_of


class TiedGradients:
    """Adds up the gradients of a parameter over all ranks that hold it. Creation is collective over the pipeline.

    Args:
        rank: of the pipeline.
        memory: of the parameters ("host", "cuda:0").
        shared: the ranks that hold a parameter, by its name; of all such parameters, in the same order on every rank.
    """

    def __init__(self, rank: PipelineRank, memory: str, shared: Mapping[str, Sequence[int]]) -> None:
        holders = shared.items()
        self._groups = rank.subgroups.of_holders(rank.channels.communicator(memory), holders)
        self._on_host = self._groups
        if memory != HOST:
            self._on_host = rank.subgroups.of_holders(rank.communicator, holders)

    def add_up(
        self, parameters: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor | None]
    ) -> dict[str, torch.Tensor | None]:
        """Return the sums; None if no rank has a gradient. Every rank that holds a tied parameter calls it.

        Args:
            parameters: that this rank shares with others, by name.
            gradients: of this rank; None if there is none.
        """
        works: list[Work] = []
        sums: dict[str, torch.Tensor | None] = {}
        for (group, names), (host, _) in zip(self._groups, self._on_host, strict=True):
            there = bytearray(gradients[name] is not None for name in names)
            host.allreduce(Buffer.of(there), Buffer.of(there), op=ReduceOp.MAX).wait()
            for name, is_there in zip(names, there, strict=True):
                sums[name] = None
                if is_there:
                    own = gradients[name]
                    given = torch.zeros_like(parameters[name]) if own is None else own.detach()
                    given = (given.to_dense() if given.is_sparse else given).contiguous()
                    sums[name] = total = torch.empty_like(given)
                    works.append(group.allreduce(buffer_of(given), buffer_of(total)))
        for work in works:
            work.wait()
        return sums
