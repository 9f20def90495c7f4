"""What models do with tensors gives the numbers and gradients of one process when the sequence is divided."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from context_ranks import divided, error_of, on_ranks
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from unidist.errors import UsageError

B, T, C, V = 2, 11, 6, 7  # T divides by nothing
_generator = torch.Generator().manual_seed(0)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator, dtype=torch.float64)


TOKENS = torch.randint(0, V, (B, T), generator=_generator)
LABELS = torch.randint(0, V, (B, T), generator=_generator)
LABELS[0, -2:] = LABELS[1, 0] = -100
PADDING = torch.arange(T)[None] < torch.tensor([[T], [T - 3]])
X, Y, WEIGHT, TABLE, PLACES = _random(B, T, C), _random(B, T, C), _random(V, C), _random(V, C), _random(T, C)

Operation = Callable[..., Any]

# x: (B, T, C), divided; w: (V, C) and p: (T, C), whole.
OPERATIONS: dict[str, Operation] = {
    "arithmetic": lambda x, w, p: ((x + 1) * 2 - x / 3) ** 2 + (-x).exp() + 1 / (x.abs() + 2),
    "broadcast of places": lambda x, w, p: x * p + p[None] - p[:, :1],
    "places from shapes": lambda x, w, p: x + p[torch.arange(x.shape[1])] + torch.arange(x.size(1))[:, None],
    "reversed operands": lambda x, w, p: 2 - (p + x) + torch.where(p > 0, x, 0.5),
    "in place": lambda x, w, p: (x * 1).add_(p).mul_(2).clamp_(-1, 1),
    "activations": lambda x, w, p: F.gelu(x) + F.silu(x) + x.relu() + F.leaky_relu(x) + torch.tanh(x).sigmoid(),
    "linear": lambda x, w, p: F.linear(x, w, w[:, 0]),
    "matrix product": lambda x, w, p: x @ w.t() + torch.matmul(x, w.T),
    "product with tokens behind": lambda x, w, p: w @ x.transpose(1, 2),
    "products of tokens": lambda x, w, p: x @ x.transpose(-2, -1),
    "spelled out attention": lambda x, w, p: (
        (x @ x.mT / math.sqrt(C)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1) @ (x * 2)
    ),
    "linear attention": lambda x, w, p: x @ (x.transpose(1, 2) @ (x * p)),
    "mixing of tokens": lambda x, w, p: F.linear(x.transpose(1, 2), torch.ones(3, T, dtype=x.dtype) / T),
    "einsum": lambda x, w, p: torch.einsum("btc,vc->btv", x, w),
    "einsum of places": lambda x, w, p: torch.einsum("btc,tc->bc", x, p),
    "einsum over tokens": lambda x, w, p: torch.einsum("btc,bsc->bts", x, x),
    "tensordot": lambda x, w, p: torch.tensordot(x, w, ([2], [1])) + torch.tensordot(x, p, 2)[:, None, None],
    "norms": lambda x, w, p: F.layer_norm(x, (C,), w[0]) + F.rms_norm(x, (C,), w[1]),
    "norm by hand": lambda x, w, p: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[0],
    "softmax": lambda x, w, p: x.softmax(-1) + F.log_softmax(x, dim=2) + torch.softmax(x, 0),
    "softmax over tokens": lambda x, w, p: x.softmax(1),
    "means": lambda x, w, p: [x.mean(), x.mean(1), x.mean(-1), x.mean((0, 1), keepdim=True), torch.mean(x, dim=[1])],
    "sums": lambda x, w, p: [x.sum(), x.sum(1, keepdim=True), x.sum((1, 2)), x.sum(-1), torch.sum(x)],
    "other reductions": lambda x, w, p: [
        *x.max(-1), *x.max(1), x.amax(1), x.amax(-1), x.std(1), x.var(), x.norm(), x.norm(dim=-1), x.argmax(1),
        x.argmax(-1), x.logsumexp(1), x.logsumexp(2), (x > 0).any(), (x > 0).all(1), x.cumsum(1), x.cumsum(-1), x.min(),
        torch.maximum(x, p), torch.max(x, p), x.prod(-1), torch.linalg.vector_norm(x, dim=-1),
    ],
    "sorting": lambda x, w, p: [*x.topk(2, -1), *x.sort(-1), *x.sort(1), x.argsort(-1)],
    "heads": lambda x, w, p: x.view(B, T, 2, 3).transpose(1, 2).contiguous(),
    "heads and back": lambda x, w, p: x.reshape(B, T, 2, -1).permute(0, 2, 1, 3).transpose(1, 2).reshape(B, T, C) * p,
    "flat tokens": lambda x, w, p: (
        (x.view(-1, C) @ w.t()).view(B, T, V) + x.flatten(0, 1).unflatten(0, (B, T))[..., :1]
    ),
    "tokens first": lambda x, w, p: x.transpose(0, 1).reshape(T * B, C).view(T, B, C).transpose(0, 1) * p,
    "flat values": lambda x, w, p: [x.flatten(1).view(B, T, C) * p, x.reshape(-1)],
    "merged heads": lambda x, w, p: x.view(B, T, 2, 3).transpose(1, 2).reshape(B * 2, T, 3) * p[:, :3],
    "splits": lambda x, w, p: [*x.split(2, dim=-1), *x.chunk(3, -1), *x.split(4, dim=1), *x.chunk(2, dim=1)],
    "unbind": lambda x, w, p: [*x.unbind(0), *x.unbind(-1), *x.unbind(1)],
    "slices": lambda x, w, p: [
        x[:, :-1], x[:, 1:], x[..., :-1, :], x[:, 2:9:3], x[0], x[..., 0], x[:, None], x[:, :, None, 1:], x[1, 3:],
        x[:, -1], x[:, 0, 1:], x[:, [-1]], x[:, :3], x[:, 5:6], x.narrow(1, 2, 5), x.select(1, 4), x[:, :, [1, 0]],
    ],
    "shifted": lambda x, w, p: (x[:, 1:] - x[:, :-1]).pow(2).mean(),
    "masks": lambda x, w, p: [
        x[PADDING], x.masked_fill(PADDING[..., None], 0.0), (x * PADDING[..., None]).sum(1), x[0][PADDING[0]],
        x[torch.arange(B), PADDING.sum(-1) - 1], x.masked_select(PADDING[..., None]),
    ],
    "gather": lambda x, w, p: [
        x.gather(-1, TOKENS[..., None] % C), x.gather(1, TOKENS[..., None].expand(B, T, C)),
        x.index_select(1, torch.tensor([4, 1])), x.take_along_dim(TOKENS[..., None] % C, -1),
    ],
    "cat": lambda x, w, p: [
        torch.cat([x, p.expand(B, T, C)], -1), torch.cat([w[None, :1].expand(B, 1, C), x], 1), torch.cat([x, x], 1),
        torch.stack([x, x * p]), torch.stack([x, x], -1),
    ],
    "roll and flip": lambda x, w, p: [x.roll(1, 1), x.roll((1, 2), (1, 2)) * p, x.flip(1) + x, x.flip(-1)],
    "pad": lambda x, w, p: [F.pad(x, (1, 0)), F.pad(x, (0, 0, 1, 0))[:, :-1], F.pad(x, (0, 1, 0, 2), value=1.0)],
    "expand and repeat": lambda x, w, p: [
        x[:, :, None].expand(B, T, 3, C).reshape(B, T, 3 * C), x.repeat(1, 1, 2), x.repeat_interleave(2, dim=-1),
        x.unsqueeze(0).expand(2, -1, -1, -1), x.repeat(1, 2, 1), x.repeat_interleave(2, 1),
    ],
    "pairs": lambda x, w, p: (x[:, :, None] - x[:, None]).sum(-1),
    "views of complex numbers": lambda x, w, p: torch.view_as_real(
        torch.view_as_complex(x.view(B, T, 3, 2)) * torch.polar(torch.ones(T, 3).double(), p[:, :3].detach())
    ),
    "rotary": lambda x, w, p: x * p.cos() + torch.cat((-x[..., 3:], x[..., :3]), -1) * p.sin(),
    "cross entropy": lambda x, w, p: [
        F.cross_entropy((x @ w.t()).view(-1, V), LABELS.view(-1)),
        F.cross_entropy((x @ w.t()).transpose(1, 2), LABELS, reduction="sum"),
        F.cross_entropy((x @ w.t())[..., :-1, :].reshape(-1, V), LABELS[..., 1:].reshape(-1), label_smoothing=0.1),
        F.cross_entropy((x @ w.t()).flatten(0, 1), LABELS.flatten(), weight=w[:, 0].detach().abs()),
        F.cross_entropy((x @ w.t()).flatten(0, 1), LABELS.flatten(), reduction="none"),
        F.nll_loss((x @ w.t()).log_softmax(-1).transpose(1, 2), LABELS),
        F.cross_entropy((x @ w.t()).flatten(0, 1), torch.ones(B * T, V).double() / V),
    ],
    "other losses": lambda x, w, p: [
        F.mse_loss(x, Y), F.l1_loss(x, Y, reduction="sum"), F.smooth_l1_loss(x[:, :3], Y[:, :3]), F.mse_loss(x, x * p),
        F.binary_cross_entropy_with_logits(x, (Y > 0).double()), F.huber_loss(x, Y, reduction="none"),
        F.kl_div(x.log_softmax(-1), Y.softmax(-1), reduction="batchmean"), F.cosine_similarity(x, Y, dim=-1),
    ],
    "batches": lambda x, w, p: [
        F.conv1d(x.reshape(B * T, 1, C), torch.ones(2, 1, 3).double(), padding=1), F.group_norm(x.reshape(-1, C), 2),
    ],
    "accuracy": lambda x, w, p: [
        ((x @ w.t()).argmax(-1) == LABELS).float().mean(), ((x @ w.t()).argmax(-1) == LABELS)[PADDING].sum(),
    ],
    "assignment": lambda x, w, p: _assigned(x * 1),
    "types": lambda x, w, p: [x.float(), x.to(torch.float32).type_as(x), x.bool(), torch.zeros_like(x), x.new_zeros(2)],
    "one token": lambda x, w, p: [x[:, :1] * 2, x[:, :1] + p, x[:, :1].squeeze(1), x[:, -1:].expand(B, 3, C)],
    "multiple of two": lambda x, w, p: x[:, :10].reshape(B, 5, 2 * C),
}  # fmt: skip


def _assigned(x: Any) -> Any:
    x[:, 2:5] = 0.0
    x[..., :2] = 1.0
    x[0, :, 3] = Y[0, :, 3]
    return x


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_the_numbers_of_one_process(name: str) -> None:
    inputs = {"x": X, "w": WEIGHT, "p": PLACES}
    for size in (2, 3):
        assert error_of(OPERATIONS[name], inputs, {"x": 1}, size) < (1e-6 if name == "types" else 1e-12)


def test_more_ranks_than_tokens() -> None:
    def function(x: Any, w: Any, p: Any) -> Any:
        hidden = F.layer_norm(x * p[:3], (C,)) @ w.t()
        q = hidden[..., :6].view(B, 3, 2, 3).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(B, 3, C)
        return F.cross_entropy((mixed @ w.t()).view(-1, V), LABELS[:, :3].reshape(-1))

    assert error_of(function, {"x": X[:, :3], "w": WEIGHT, "p": PLACES}, {"x": 1}, 4) < 1e-12


def test_tokens_are_looked_up_and_compared() -> None:
    def function(tokens: Any, table: Any) -> Any:
        hidden = F.embedding(tokens, table) + table[tokens]
        mask = (tokens != 0)[..., None]
        counted = F.one_hot(tokens, V).sum((0, 1))
        shifted = F.cross_entropy((hidden @ table.t())[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return [hidden * mask, counted, shifted, (tokens == TOKENS).all(), tokens.max(), tokens.float().mean()]

    assert error_of(function, {"tokens": TOKENS, "table": TABLE}, {"tokens": 1}, 3) < 1e-6


REFUSED: dict[str, tuple[Operation, str]] = {
    "convolution": (lambda x: F.conv1d(x.transpose(1, 2), torch.ones(2, C, 3).double()), "conv1d mixes tokens"),
    "batch norm": (lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True), "statistics over the tokens"),
    "recurrent": (lambda x: torch.nn.LSTM(C, 3, batch_first=True).double()(x), "lstm"),
    "norm over tokens": (lambda x: F.layer_norm(x, (T, C)), "normalizes over the sequence"),
    "unknown": (lambda x: torch.fft.fft(x, dim=1), "torch.fft.fft has no rule"),
    "function": (lambda x: _Doubled.apply(x) + 1, "_DoubledBackward is an autograd.Function"),
    "backward": (lambda x: x.backward(x), "begins at a divided tensor"),
    "out": (lambda x: torch.add(x, 1, out=torch.empty(B, T, C)), "writes to out="),
    "a single place": (lambda x: x.__setitem__((0, 1), 0.0), "assigns to single places"),
}


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name: str) -> None:
    function, message = REFUSED[name]

    def rank(axis: Any) -> str:
        with pytest.raises(UsageError, match="context: ") as caught:
            function(divided(X, 1, axis))
        return str(caught.value)

    for text in on_ranks(2, rank):
        assert message in text
        assert "scaled_dot_product_attention" in text
        assert "unidist.torch.context.whole(x)" in text
