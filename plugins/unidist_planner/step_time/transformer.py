"""Transformers by their sizes: the work of one update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from typing_extensions import override

from unidist.cost_model.figures import Precision, Workload
from unidist.cost_model.work import ModelWork, PieceWork
from unidist.errors import ConfigurationError
from unidist_planner.memory.transformer import Transformer


@dataclass(frozen=True)
class TransformerWork(ModelWork):
    """A transformer by its sizes.

    Floating-point operations by Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), appendix: two for each
    element of a matrix and each token, and 4 s^2 h for attention: for GPT-2 24 s h^2 + 4 s^2 h for a sample's block and
    2 s h v for the head. Kernels of fused attention leave out the half that a causal mask hides, so these count, but
    take no time. Whatever is kept for the backward pass was written once and is read once, so the traffic of a forward
    pass is taken to be twice the activations of a block.

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
        divides = {"heads": model.num_heads, "hidden": model.hidden}
        if model.num_kv_heads != model.num_heads:
            divides["heads of keys and values"] = model.num_kv_heads
        object.__setattr__(self, "divides", divides)
        object.__setattr__(self, "sequence", model.sequence)
        object.__setattr__(self, "experts", model.experts)
        object.__setattr__(self, "top_k", model.top_k)

    @override
    @lru_cache(maxsize=256)  # noqa: B019  # works are few, and a search asks for the same sizes all the time
    def workload(self, samples: int) -> Workload:
        transformer = replace(self.transformer, batch=samples)
        return Workload(transformer.figures(), self.optimizer, self.precision, transformer)

    @override
    def with_batch(self, batch: int) -> ModelWork:
        return replace(self, batch=batch)

    @override
    @lru_cache(maxsize=256)  # noqa: B019  # likewise
    def forward(self, samples: int, itemsize: int) -> PieceWork:
        model = replace(self.transformer, batch=samples)
        tokens, width = samples * model.sequence, model.hidden
        attention = tokens * 4 * model.sequence * width
        router = width * model.experts if model.experts > 1 else 0
        weights = model.attention_weights + router + model.top_k * model.mlp_weights
        products = 2 + 2 + (3 if model.gated else 2) * model.top_k  # Q, K and V are one; two of attention
        return PieceWork(
            blocks=float(model.layers * (tokens * 2 * weights + attention)),
            outside=float(2 * tokens * width * model.vocabulary),
            traffic=2 * model.bytes(itemsize).blocks,
            border=float(tokens * width),
            keys=float(tokens * model.keys),
            attention=float(model.layers * attention),
            skipped=model.layers * attention / 2 if model.attention == "fused" else 0.0,
            products=float(model.layers * products),
        )
