"""The vocabulary cut over ranks: the embedding, and a cross-entropy that never sees all logits of a token.

Shoeybi et al. 2019, section 3: each rank looks up the tokens whose rows it has; of the loss, ranks exchange three
numbers for each token, not its logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from typing_extensions import override

from unidist_tensor_parallel._torch.layers.axis import TensorAxis
from unidist_tensor_parallel._torch.layers.linear import ColumnLinear
from unidist_tensor_parallel._torch.layers.region import Region
from unidist_tensor_parallel.layout.cuts import Cut
from unidist_torch.models.guarded_parameter import plain_part
from unidist_torch.operations.differentiable import check_once


class VocabularyEmbedding(torch.nn.Embedding):
    """Has some of the rows. `unidist_` attributes are set by `cut_embedding`."""

    unidist_region: Region
    unidist_cut: Cut

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ids, the same on all ranks. Collective."""
        axis = self.unidist_region.axis
        first = sum(self.unidist_cut.counts[: axis.rank])
        count = self.unidist_cut.counts[axis.rank]
        whole = self.unidist_cut.total
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < whole:
            raise IndexError(
                f"index out of range in an embedding of {whole} rows: {int(ids.min())} to {int(ids.max())}"
            )
        local = ids - first
        elsewhere = (local < 0) | (local >= count)
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding in range(count) else None
        rows = F.embedding(local.masked_fill(elsewhere, 0), plain_part(self.weight), padding)
        return axis.leave(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))

    @override
    def extra_repr(self) -> str:
        return f"{self.unidist_cut.total}, {self.embedding_dim}, rows cut over {self.unidist_cut.size}"


def why_whole(layer: torch.nn.Embedding) -> str:
    """Return why an embedding cannot be cut; "" if it can."""
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(layer, option):
            return f"its option {option} looks at rows that other ranks have. Leave the option out to cut it"
    return ""


def cut_embedding(layer: Any, cut: Cut, region: Region) -> None:
    """Let an embedding look up the rows of this rank. Its weight is cut already."""
    layer.__class__ = VocabularyEmbedding
    layer.unidist_region, layer.unidist_cut = region, cut


class VocabularyCrossEntropy(torch.nn.Module):
    """Mean cross-entropy of the logits of an output layer, which may be cut over ranks.

        loss_fn = VocabularyCrossEntropy(model.head)
        loss = loss_fn(model(tokens), targets)

    If the layer has the role `column`, it returns this rank's logits only, and ranks exchange three numbers for each
    token. Otherwise the loss is `torch.nn.functional.cross_entropy`.

    Args:
        head: the linear layer that returns the logits.
        ignore_index: targets that do not count.
        label_smoothing: between 0 and 1.
    """

    def __init__(self, head: torch.nn.Module, *, ignore_index: int = -100, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self._head = [head]  # its parameters are the model's
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the targets that count, a scalar, the same on all ranks of the axis. Collective.

        Args:
            logits: `(..., n)`, as the layer has returned them.
            targets: `(...)`, class indices of the whole vocabulary.
        """
        flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        (head,) = self._head
        if not isinstance(head, ColumnLinear) or head.unidist_gathers:
            return F.cross_entropy(flat, wanted, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing)
        losses = _TokenLosses.apply(  # type: ignore[no-untyped-call]  # torch's is not annotated
            flat, wanted, head.unidist_region.axis, head.unidist_cut, self.ignore_index, self.label_smoothing
        )
        head.unidist_region.end_cut()  # no row layer follows
        total: torch.Tensor = losses.sum() / (wanted != self.ignore_index).sum()
        return total


class _TokenLosses(torch.autograd.Function):
    """Loss of each token, 0 where it does not count."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        axis: TensorAxis,
        cut: Cut,
        ignored: int,
        smoothing: float,
    ) -> torch.Tensor:
        wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        wide = wide - axis.largest(wide.amax(dim=-1))[:, None]
        counts = targets != ignored
        local = targets - sum(cut.counts[: axis.rank])
        here = counts & (local >= 0) & (local < cut.counts[axis.rank])
        index = local.masked_fill(~here, 0)[:, None]
        chosen = wide.gather(1, index)[:, 0].masked_fill(~here, 0.0)
        exponentials = wide.exp()
        denominators, chosen, sums = axis.sum(
            torch.stack([exponentials.sum(-1), chosen, wide.sum(-1) if smoothing else torch.zeros_like(chosen)])
        )
        losses: torch.Tensor = denominators.log() - (1 - smoothing) * chosen - smoothing * sums / cut.total
        ctx.save_for_backward(exponentials.div_(denominators[:, None]), index, here, counts)
        ctx.smoothing, ctx.total, ctx.dtype = smoothing, cut.total, logits.dtype
        return losses.masked_fill(~counts, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        check_once("VocabularyCrossEntropy")
        shares, index, here, counts = ctx.saved_tensors
        result = shares - ctx.smoothing / ctx.total
        result.scatter_add_(1, index, (ctx.smoothing - 1) * here.to(result.dtype)[:, None])
        result *= (gradient * counts)[:, None]
        return result.to(ctx.dtype), None, None, None, None, None
