"""Gradients of parameters that several ranks of a pipeline hold, such as an embedding that is the output layer too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from unidist.buffer import Buffer, DType
from unidist.communicator import Work
from unidist_pipeline.execution.channels import Channels
from unidist_torch.memory import buffer_of, memory_kind


class TiedGradients:
    """Adds up the gradients of a parameter on all ranks that hold it: in one order, so that all get the same.

    Args:
        channels: of the pipeline.
        rank: of this process in the pipeline.
        shared: the ranks that hold a parameter, by its name; of all such parameters, in the same order on every rank.
    """

    def __init__(self, channels: Channels, rank: int, shared: Mapping[str, Sequence[int]]) -> None:
        self._channels = channels
        self._rank = rank
        self._shared = {name: ranks for name, ranks in shared.items() if rank in ranks}

    def add_up(
        self, parameters: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor | None]
    ) -> dict[str, torch.Tensor | None]:
        """Return the sums; None if no rank has a gradient. Every rank that holds a tied parameter calls it.

        Args:
            parameters: that this rank shares with others, by name.
            gradients: of this rank; None if there is none.
        """
        works: list[Work] = []
        pieces: dict[str, dict[int, tuple[Buffer, torch.Tensor]]] = {}
        for name, ranks in self._shared.items():
            parameter, own = parameters[name], gradients[name]
            there = Buffer.allocate(1, DType.UINT8)
            there.bytes()[0] = own is not None
            dense = torch.zeros_like(parameter) if own is None else own.to_dense() if own.is_sparse else own
            dense = dense.detach().contiguous()
            pieces[name] = {self._rank: (there, dense)}
            data = self._channels.communicator(memory_kind(dense))
            host = self._channels.communicator(there.memory)
            for peer in ranks:
                if peer == self._rank:
                    continue
                theirs = Buffer.allocate(1, DType.UINT8), torch.empty_like(dense)
                pieces[name][peer] = theirs
                works += [host.send(there, to=peer), data.send(buffer_of(dense), to=peer)]
                works += [host.recv(theirs[0], source=peer), data.recv(buffer_of(theirs[1]), source=peer)]
        for work in works:
            work.wait()
        return {name: _sum([pieces[name][rank] for rank in ranks]) for name, ranks in self._shared.items()}


def _sum(pieces: Sequence[tuple[Buffer, torch.Tensor]]) -> torch.Tensor | None:
    found = [tensor for there, tensor in pieces if there.bytes()[0]]
    if not found:
        return None
    total = found[0].clone()
    for each in found[1:]:
        total += each
    return total
