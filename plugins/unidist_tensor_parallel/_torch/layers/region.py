"""Regions of a model: outside of sequence parallelism activations are whole on every rank, inside they are cut.

Both kinds have the ranks of the axis, and the random numbers between cut layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from unidist.errors import UsageError
from unidist_tensor_parallel._torch.layers.axis import TensorAxis
from unidist_tensor_parallel._torch.layers.random import CutRandom
from unidist_tensor_parallel._torch.layers.rank_bound import RankBound
from unidist_tensor_parallel.layout.cuts import split_counts


class Region(RankBound):
    """Activations between the cut layers are whole, the same on every rank.

    Args:
        axis: the ranks.
        random: of the model.
    """

    def __init__(self, axis: TensorAxis, random: CutRandom) -> None:
        self.axis = axis
        self.random = random

    def begin_cut(self, layer: torch.nn.Module, outputs: torch.Tensor) -> None:
        """Note that from here to the next row layer ranks compute different things."""
        if layer.training:
            self.random.begin(outputs.device)

    def end_cut(self) -> None:
        """Note that a row layer begins: from its output on all ranks compute the same."""
        self.random.end()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of a layer whose outputs are cut."""
        return self.axis.enter(x)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of a layer whose inputs are cut, from this rank's partial sum."""
        return self.axis.leave(x)

    def whole_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter that is not cut, for use in this region."""
        return parameter


class SequenceRegion(Region):
    """Activations between the cut layers are cut along the sequence.

    Parameters that are not cut there (norms, biases of row layers) see some of the tokens on each rank, so their
    gradients are summed over the ranks, in the backward pass itself; unless they come after a layer that gathers its
    outputs.

    Args:
        axis: the ranks.
        random: of the model.
        dim: of the sequence in activations, from the end.
    """

    def __init__(self, axis: TensorAxis, random: CutRandom, dim: int) -> None:
        super().__init__(axis, random)
        self.dim = dim
        self._counts: Sequence[int] | None = None

    @property
    def counts(self) -> Sequence[int]:
        """Tokens of each rank in the present batch."""
        if self._counts is None:
            raise UsageError(
                "a layer within sequence parallelism runs before its first block: the sequence is not cut yet. Run the "
                "blocks in their order, or leave sequence out of --strategy tensor=N"
            )
        return self._counts

    @override
    def begin_cut(self, layer: torch.nn.Module, outputs: torch.Tensor) -> None:
        """See `Region.begin_cut`: everything in here is different on each rank."""

    @override
    def end_cut(self) -> None:
        pass

    def has_all_tokens(self, x: torch.Tensor) -> bool:
        """Return whether an activation has the tokens of all ranks, as after a layer that gathers its outputs.

        With more ranks than tokens, one rank's may be all of them; then they count as its own.
        """
        if x.dim() < -self.dim:
            return False
        return x.shape[self.dim] == sum(self.counts) != self.counts[self.axis.rank]

    def cut_tokens(self, x: torch.Tensor, *, training: bool) -> torch.Tensor:
        """Return this rank's tokens of a whole activation: the first block's input."""
        if training:
            self.random.begin(x.device)
        self._counts = split_counts(x.shape[self.dim], self.axis.size, what="tokens of a sequence")
        return self.axis.split(x, self._counts, self.dim)

    def gather_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole activation: the last block's output."""
        self.random.end()
        return self.axis.gathered(x, self.counts, self.dim)

    @override
    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return self.axis.enter_sequence(x, self.counts, self.dim)

    @override
    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return self.axis.leave_sequence(x, self.counts, self.dim)

    @override
    def whole_parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        return self.axis.summed_gradient(parameter)
