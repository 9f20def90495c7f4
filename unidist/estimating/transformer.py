"""A transformer by its sizes: how many parameters it has, and what its forward pass keeps.

Activations by Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(https://arxiv.org/abs/2205.05198), section 4: a layer keeps s b h (34 + 5 a s / h) bytes in 16-bit precision, and
s b h 2 bytes when it is recomputed. The terms are spelt out here by element, so that they hold for 32-bit too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unidist.errors import ConfigurationError, unknown_choice
from unidist.estimating.figures import ActivationBytes, ActivationModel, ModelFigures

LOGIT_BYTES = 4
"""The loss keeps the logits in float32, whatever the rest is computed in."""
MASK_BYTES = 1
"""A mask of dropout has a byte for each element."""


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
    """

    layers: int
    hidden: int
    vocabulary: int
    sequence: int
    heads: int = 0
    batch: int = 1
    attention: Literal["materialized", "fused"] = "materialized"

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("layers", "hidden", "vocabulary", "sequence", "batch"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"a transformer with {name}={getattr(self, name)}: give at least 1")
        if self.heads < 0 or self.hidden % self.num_heads:
            raise ConfigurationError(f"heads={self.heads} does not divide hidden={self.hidden}")
        if self.attention not in ("materialized", "fused"):
            raise unknown_choice("attention", self.attention, ("materialized", "fused"))

    @property
    def num_heads(self) -> int:
        """Heads of attention."""
        return self.heads or max(1, self.hidden // 64)

    def figures(self) -> ModelFigures:
        """Return the number of parameters, exactly: L (12 h^2 + 13 h) + (v + s) h + 2 h."""
        h = self.hidden
        block = 12 * h * h + 13 * h
        embedding = (self.vocabulary + self.sequence) * h
        return ModelFigures(self.layers * block + embedding + 2 * h, largest_unit=max(block, embedding))

    def bytes(self, itemsize: int) -> ActivationBytes:
        """See `ActivationModel.bytes`."""
        sbh = self.sequence * self.batch * self.hidden
        # e = itemsize. Attention: input, Q, K, V and the projection's input 5e, a mask; the MLP's two inputs and
        # GeLU's 9e, a mask; the two norms 2e.
        linear = (5 + 9 + 2) * itemsize + 2 * MASK_BYTES
        # softmax, what its dropout gives, and the mask
        quadratic = 2 * itemsize + MASK_BYTES if self.attention == "materialized" else 0
        block = sbh * linear + self.num_heads * self.sequence**2 * self.batch * quadratic
        # the embedding's dropout, the last norm, the head's input and the loss: 4 s b h (1 + v / h) and a mask
        outside = sbh * (MASK_BYTES + 2 * itemsize) + LOGIT_BYTES * self.sequence * self.batch * self.vocabulary
        return ActivationBytes(
            blocks=self.layers * block,
            block_inputs=self.layers * sbh * itemsize,
            largest_block=block,
            outside=outside,
        )
