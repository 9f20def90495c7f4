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
    """A decoder; by default like GPT-2: biases, learnt positions, an MLP of 4 h, output tied to the embedding.

    Llama's (https://arxiv.org/abs/2307.09288) is `gated`, `rotary` and `untied`, with `kv_heads` and `ffn_hidden`; a
    mixture of experts as Mixtral's (https://arxiv.org/abs/2401.04088) has `experts` too.

    Args:
        layers: number of blocks (L).
        hidden: width (h).
        vocabulary: words (v).
        sequence: length of a sample (s).
        heads: of attention (a); default: one for each 64 of the width.
        batch: samples of one forward pass on one rank (b).
        kv_heads: heads of keys and values (GQA); default: as many as of queries.
        ffn_hidden: width inside of the MLP (f); default: 4 h.
        gated: the MLP has three matrices (SwiGLU), and like in Llama nothing has biases.
        rotary: positions are rotations of queries and keys, without parameters.
        untied: the output has a matrix of its own.
        experts: MLPs of each block; 1 for none to choose from.
        top_k: of these, how many each token goes through.
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
    kv_heads: int = 0
    ffn_hidden: int = 0
    gated: bool = False
    rotary: bool = False
    untied: bool = False
    experts: int = 1
    top_k: int = 1

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("layers", "hidden", "vocabulary", "sequence", "batch", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"a transformer with {name}={getattr(self, name)}: give at least 1")
        if self.heads < 0 or self.hidden % self.num_heads:
            raise ConfigurationError(f"heads={self.heads} does not divide hidden={self.hidden}")
        if self.kv_heads < 0 or self.num_heads % self.num_kv_heads:
            raise ConfigurationError(f"kv_heads={self.kv_heads} does not divide heads={self.num_heads}")
        if self.ffn_hidden < 0:
            raise ConfigurationError(f"ffn_hidden={self.ffn_hidden}: give at least 1")
        if self.top_k > self.experts:
            raise ConfigurationError(f"top_k={self.top_k}: there are only {self.experts} experts to choose from")
        if self.attention not in ("materialized", "fused"):
            raise unknown_choice("attention", self.attention, ("materialized", "fused"))
        if self.dropout not in ("masks", "floats", "none"):
            raise unknown_choice("dropout", self.dropout, ("masks", "floats", "none"))

    @property
    def num_heads(self) -> int:
        """Heads of attention."""
        return self.heads or max(1, self.hidden // 64)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.num_heads

    @property
    def mlp_hidden(self) -> int:
        """Width inside of the MLP."""
        return self.ffn_hidden or 4 * self.hidden

    @property
    def keys(self) -> int:
        """Width of keys and values together."""
        return 2 * self.hidden * self.num_kv_heads // self.num_heads

    @property
    def attention_weights(self) -> int:
        """Elements of the matrices of one block's attention."""
        return self.hidden * (2 * self.hidden + self.keys)

    @property
    def mlp_weights(self) -> int:
        """Elements of the matrices of one MLP, of which a block has `experts`."""
        return (3 if self.gated else 2) * self.hidden * self.mlp_hidden

    def figures(self) -> ModelFigures:
        """Return the number of parameters, exactly. GPT-2's: L (12 h^2 + 13 h) + (v + s) h + 2 h.

        That of one expert is an MLP; the router that chooses among several has h parameters for each.
        """
        h = self.hidden
        mlp, attention, norm = self.mlp_weights, self.attention_weights, h
        if not self.gated:  # each matrix, and each norm, has a bias
            mlp += self.mlp_hidden + h
            attention += h + self.keys + h
            norm += h
        experts = self.experts * mlp
        block = attention + experts + 2 * norm + (self.experts * h if self.experts > 1 else 0)
        embedding = self.vocabulary * h
        outside = embedding + (embedding if self.untied else 0) + (0 if self.rotary else self.sequence * h)
        return ModelFigures(
            self.layers * block + outside + norm,
            largest_unit=max(block, outside),
            outside=outside,
            experts=self.layers * experts if self.experts > 1 else 0,
        )

    @override
    def bytes(self, itemsize: int) -> ActivationBytes:
        sb = self.sequence * self.batch
        sbh = sb * self.hidden
        mask = {"masks": 1, "floats": itemsize, "none": 0}[self.dropout]
        # e = itemsize. Attention: input, Q, the projection's input 3e, K and V, a mask; the MLP's input e and what is
        # inside of it, a mask; the two norms 2e.
        linear = (3 + 1 + 2) * itemsize + 2 * mask
        # GeLU's two; of SwiGLU its gate, what comes of that, the other side and their product
        inside = self.top_k * (4 if self.gated else 2) * self.mlp_hidden
        block = sbh * linear + sb * (self.keys + inside) * itemsize
        if self.experts > 1:  # copies of a token for each of its experts, and what these give
            block += sbh * 2 * self.top_k * itemsize
        if self.attention == "materialized":  # softmax, the mask of its dropout, and what that gives
            quadratic = itemsize + (mask + itemsize if mask else 0)
            block += self.num_heads * self.sequence**2 * self.batch * quadratic
        # the embedding's dropout, the last norm, the head's input and the loss: 4 s b h (1 + v / h) and a mask
        outside = sbh * (mask + 2 * itemsize) + LOGIT_BYTES * self.sequence * self.batch * self.vocabulary
        return ActivationBytes(
            blocks=self.layers * block,
            block_inputs=self.layers * sbh * itemsize,
            largest_block=block,
            outside=outside,
        )
