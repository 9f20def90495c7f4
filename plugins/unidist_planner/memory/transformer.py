"""A transformer by its sizes: how many parameters it has, and what its forward pass keeps.

Activations by Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(https://arxiv.org/abs/2205.05198), section 4: a layer keeps s b h (34 + 5 a s / h) bytes in 16-bit precision, and
s b h 2 bytes when it is recomputed. The terms are spelt out here by element, so that they hold for 32-bit too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from unidist.cost_model.figures import ActivationBytes, ActivationModel, ModelFigures
from unidist.errors import ConfigurationError, unknown_choice

LOGIT_BYTES = 4
"""The loss keeps the logits in float32, whatever the rest is computed in."""


@dataclass(frozen=True)
class Transformer(ActivationModel):
    """A decoder as GPT-2 has it: biases, learnt positions, an MLP of 4 h, output tied to the embedding.

    Args:
        layers: number of blocks (L).
        hidden: width (h).
        vocabulary: words (v).
        sequence: length of a sample (s).
        heads: of attention (a); default: one for each 64 of the width.
        batch: samples of one forward pass on one rank (b).
        attention: "materialized": the s x s matrices are kept, as the paper has it; "fused": they are computed again
            by the kernel (FlashAttention, `scaled_dot_product_attention`).
        dropout: "masks": of one byte for each element, as the paper has it and accelerators do; "floats": masks are as
            wide as what they are for, as PyTorch does on a CPU; "none": there is no dropout.
    """

    layers: int
    hidden: int
    vocabulary: int
    sequence: int
    heads: int = 0
    batch: int = 1
    attention: Literal["materialized", "fused"] = "materialized"
    dropout: Literal["masks", "floats", "none"] = "masks"

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("layers", "hidden", "vocabulary", "sequence", "batch"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"a transformer with {name}={getattr(self, name)}: give at least 1")
        if self.heads < 0 or self.hidden % self.num_heads:
            raise ConfigurationError(f"heads={self.heads} does not divide hidden={self.hidden}")
        if self.attention not in ("materialized", "fused"):
            raise unknown_choice("attention", self.attention, ("materialized", "fused"))
        if self.dropout not in ("masks", "floats", "none"):
            raise unknown_choice("dropout", self.dropout, ("masks", "floats", "none"))

    @property
    def num_heads(self) -> int:
        """Heads of attention."""
        return self.heads or max(1, self.hidden // 64)

    def figures(self) -> ModelFigures:
        """Return the number of parameters, exactly: L (12 h^2 + 13 h) + (v + s) h + 2 h."""
        h = self.hidden
        block = 12 * h * h + 13 * h
        embedding = (self.vocabulary + self.sequence) * h
        return ModelFigures(
            self.layers * block + embedding + 2 * h, largest_unit=max(block, embedding), outside=embedding
        )

    @override
    def bytes(self, itemsize: int) -> ActivationBytes:
        sbh = self.sequence * self.batch * self.hidden
        mask = {"masks": 1, "floats": itemsize, "none": 0}[self.dropout]
        # e = itemsize. Attention: input, Q, K, V and the projection's input 5e, a mask; the MLP's two inputs and
        # GeLU's 9e, a mask; the two norms 2e.
        linear = (5 + 9 + 2) * itemsize + 2 * mask
        quadratic = 0
        if self.attention == "materialized":  # softmax, the mask of its dropout, and what that gives
            quadratic = itemsize + (mask + itemsize if mask else 0)
        block = sbh * linear + self.num_heads * self.sequence**2 * self.batch * quadratic
        # the embedding's dropout, the last norm, the head's input and the loss: 4 s b h (1 + v / h) and a mask
        outside = sbh * (mask + 2 * itemsize) + LOGIT_BYTES * self.sequence * self.batch * self.vocabulary
        return ActivationBytes(
            blocks=self.layers * block,
            block_inputs=self.layers * sbh * itemsize,
            largest_block=block,
            outside=outside,
        )
