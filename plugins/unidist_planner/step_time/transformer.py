"""Transformers by their sizes: the work of one update."""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override

from unidist.cost_model.figures import Precision, Workload
from unidist.cost_model.work import PieceWork, Work
from unidist.errors import ConfigurationError
from unidist_planner.memory.transformer import Transformer


@dataclass(frozen=True)
class TransformerWork(Work):
    """A transformer by its sizes.

    Floating-point operations by Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), appendix: a block's matrix
    products take 24 s h^2 + 4 s^2 h for each sample, the head's 2 s h v. Whatever is kept for the backward pass was
    written once and is read once, so the traffic of a forward pass is taken to be twice the activations of a block.

    Args:
        transformer: sizes; its `batch` does not count.
        batch: samples of one update, on all ranks together.
        optimizer: see `Workload`.
        precision: likewise.
    """

    transformer: Transformer
    batch: int
    optimizer: str = "adam"
    precision: Precision | None = None

    def __post_init__(self) -> None:
        """Check the batch and the names."""
        if self.batch < 1:
            raise ConfigurationError(f"a batch of {self.batch} samples: give at least 1")
        self.workload(1)
        model = self.transformer
        object.__setattr__(self, "num_blocks", model.layers)
        object.__setattr__(self, "divides", {"heads": model.num_heads, "hidden": model.hidden})

    @override
    def workload(self, samples: int) -> Workload:
        transformer = replace(self.transformer, batch=samples)
        return Workload(transformer.figures(), self.optimizer, self.precision, transformer)

    @override
    def forward(self, samples: int, itemsize: int) -> PieceWork:
        model = replace(self.transformer, batch=samples)
        tokens, width = samples * model.sequence, model.hidden
        block = tokens * (24 * width**2 + 4 * model.sequence * width)
        return PieceWork(
            blocks=float(model.layers * block),
            outside=float(2 * tokens * width * model.vocabulary),
            traffic=2 * model.bytes(itemsize).blocks,
            border=float(tokens * width),
        )
