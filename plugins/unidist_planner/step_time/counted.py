"""Work of one update of a script's model, as counted in one forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from typing_extensions import override

from unidist.cost_model.figures import (
    ActivationBytes,
    ActivationModel,
    ModelFigures,
    ParameterFigures,
    Precision,
    Workload,
)
from unidist.cost_model.step_interface import CountsOperations
from unidist.cost_model.work import CountedPass, Layer, ModelWork, PieceWork
from unidist.errors import ConfigurationError
from unidist_planner.memory.source import ScriptModel


@dataclass(frozen=True)
class _ForSamples(ActivationModel):
    """Activations for another number of samples, in proportion."""

    counted: ActivationModel
    factor: float

    def bytes(self, itemsize: int) -> ActivationBytes:
        kept = self.counted.bytes(itemsize)
        return ActivationBytes(
            kept.blocks * self.factor,
            kept.block_inputs * self.factor,
            kept.largest_block * self.factor,
            kept.outside * self.factor,
        )


@dataclass(frozen=True)
class CountedWork(ModelWork):
    """A model whose forward pass was counted. What depends on the number of samples is taken to be in proportion.

    Blocks are taken to be equal in what they compute and hold, as stages of a pipeline are: of unequal ones the mean.

    Args:
        counted: one forward pass.
        parameters: sizes, by path.
        activations: what that pass keeps; None: not known, so that memory and its traffic are without.
        batch: samples of one update, on all ranks together.
        optimizer: see `Workload`.
        precision: likewise.
        heads: of attention; None: as the model tells, if it does.
    """

    counted: CountedPass
    parameters: Mapping[str, ParameterFigures]
    activations: ActivationModel | None
    batch: int
    optimizer: str = "adam"
    precision: Precision | None = None
    heads: int | None = None
    _figures: ModelFigures = field(init=False, repr=False, compare=False)

    __hash__ = object.__hash__  # of itself: plans of one work are compared

    def __post_init__(self) -> None:
        """Check the batch and the names."""
        if self.batch < 1:
            raise ConfigurationError(f"a batch of {self.batch} samples: give at least 1")
        heads = self.heads or self.counted.heads
        divides = {"width": math.gcd(*self.counted.widths)} | ({} if heads is None else {"heads": heads})
        inside = sum(self.parameters_of(block.path) for block in self.counted.blocks)
        figures = ModelFigures.of(self.parameters)
        object.__setattr__(self, "num_blocks", len(self.counted.blocks))
        object.__setattr__(self, "divides", divides)
        object.__setattr__(self, "_figures", replace(figures, outside=figures.parameters - inside))
        self.workload(1)

    def parameters_of(self, path: str) -> int:
        """Return the number of parameters below a path."""
        below = (f"{path}.", f"{path}/")
        return sum(item.count for name, item in self.parameters.items() if name.startswith(below))

    @override
    def layers(self) -> Sequence[Layer]:
        samples = self.counted.samples
        return [Layer(each.path, self.parameters_of(each.path), each.flops / samples) for each in self.counted.blocks]

    @override
    def workload(self, samples: int) -> Workload:
        kept = None if self.activations is None else _ForSamples(self.activations, samples / self.counted.samples)
        return Workload(self._figures, self.optimizer, self.precision, kept)

    @override
    def with_batch(self, batch: int) -> ModelWork:
        return replace(self, batch=batch)

    @override
    def forward(self, samples: int, itemsize: int) -> PieceWork:
        """The traffic is twice what the blocks keep, as for a transformer."""
        factor, blocks = samples / self.counted.samples, self.counted.blocks
        kept = 0.0 if self.activations is None else self.activations.bytes(itemsize).blocks
        return PieceWork(
            blocks=factor * sum(block.flops for block in blocks),
            outside=factor * self.counted.outside,
            traffic=factor * 2 * kept,
            border=factor * max(block.passed for block in blocks),
        )


def work_from(
    found: ScriptModel,
    batch: int,
    *,
    optimizer: str = "adam",
    precision: Precision | None = None,
    heads: int | None = None,
) -> CountedWork:
    """Return what one update of a script's model computes: one forward pass on its inputs is counted.

    Args:
        found: with inputs.
        batch: samples of one update, on all ranks together.
        optimizer: see `Workload`.
        precision: likewise.
        heads: of attention; default: as counted.

    Raises:
        ConfigurationError: there are no inputs, its framework cannot count, or the model cannot run on its inputs.
    """
    if not found.inputs:
        raise ConfigurationError(
            f"{found.reference} returns a model alone; to count what it computes, return inputs for one pass too: "
            "return model, torch.zeros(8, 1024, dtype=torch.int64)"
        )
    if not isinstance(found.framework, CountsOperations):
        raise ConfigurationError(f"{found.framework.name} cannot count what a model computes; give its sizes instead")
    activations = found.activations()
    counted = found.framework.count(found.model, found.inputs)
    return CountedWork(counted, found.parameters(), activations, batch, optimizer, precision, heads)
