"""Attention of divided queries, keys and values is that of one process, for each exchange and kind of mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from context_ranks import divided, error_of, on_ranks
from torch import nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from unidist.buffer import Buffer
from unidist.communicator import Communicator, MessageOrder, Work
from unidist.errors import ConfigurationError
from unidist.testing import RecordingCommunicator
from unidist_context_parallel._torch.divided.axis import ContextAxis
from unidist_context_parallel._torch.divided.tensor import whole

B, H, T, S, D = 2, 6, 13, 9, 4
_generator = torch.Generator().manual_seed(0)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator, dtype=torch.float64)


Q, K, W = _random(B, H, T, D), _random(B, H, T, D), _random(B, H, T, D)
PADDED = torch.arange(T) < torch.tensor([T, T - 4])[:, None]
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
WINDOW = CAUSAL & ~CAUSAL.tril(-4)
BIAS = _random(1, H, T, T)
FEW = _random(B, 3, T, D)
attend = F.scaled_dot_product_attention

MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "scaled": {"is_causal": True, "scale": 0.3},
    "causal as a mask": {"attn_mask": CAUSAL},
    "padding": {"attn_mask": PADDED[:, None, None]},
    "padded in front, blind rows": {"attn_mask": (CAUSAL & PADDED.flip(-1)[:, None])[:, None]},
    "window": {"attn_mask": WINDOW[None, None]},
    "added": {"attn_mask": torch.zeros(T, T).double().masked_fill(~CAUSAL, -math.inf)},
    "bias of each head": {"attn_mask": BIAS},
}


@pytest.mark.parametrize("exchange", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(monkeypatch: pytest.MonkeyPatch, exchange: str, mask: str) -> None:
    monkeypatch.setattr(ContextAxis, "exchange", exchange)
    inputs = {"q": Q, "k": K, "v": W}
    for size in (2, 3):
        error = error_of(lambda q, k, v: attend(q, k, v, **MASKS[mask]), inputs, dict.fromkeys(inputs, 2), size)
        assert error < 1e-12


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_a_learned_bias_gets_its_gradient(monkeypatch: pytest.MonkeyPatch, exchange: str) -> None:
    monkeypatch.setattr(ContextAxis, "exchange", exchange)
    for shape in ((1, H, T, T), (T, T), (H, 1, T)):
        inputs = {"q": Q, "k": K, "v": W, "bias": _random(*shape)}
        error = error_of(lambda q, k, v, bias: attend(q, k, v, attn_mask=bias), inputs, dict.fromkeys("qkv", 2), 3)
        assert error < 1e-12


KINDS: dict[str, tuple[Callable[..., Any], dict[str, torch.Tensor], dict[str, int]]] = {
    "grouped": (
        lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True), {"q": Q, "k": FEW, "v": FEW},
        {"q": 2, "k": 2, "v": 2},
    ),
    "grouped by expanding": (
        lambda q, k, v: attend(
            q, *(x[:, :, None].expand(B, 3, 2, T, D).reshape(B, H, T, D) for x in (k, v)), is_causal=True
        ),
        {"q": Q, "k": FEW, "v": FEW}, {"q": 2, "k": 2, "v": 2},
    ),
    "wider values": (
        lambda q, k, v: attend(q, k, v, is_causal=True), {"q": Q, "k": K, "v": _random(B, H, T, 2 * D)},
        {"q": 2, "k": 2, "v": 2},
    ),
    "whole keys": (
        lambda q, k, v: attend(q, k, v), {"q": Q, "k": _random(B, H, S, D), "v": _random(B, H, S, D)}, {"q": 2}
    ),
    "whole keys, causal": (lambda q, k, v: attend(q, k, v, is_causal=True), {"q": Q, "k": K, "v": W}, {"q": 2}),
    "another sequence": (
        lambda q, k, v: attend(q, k, v, attn_mask=torch.ones(T, S).tril().bool()),
        {"q": Q, "k": _random(B, H, S, D), "v": _random(B, H, S, D)}, {"q": 2, "k": 2, "v": 2},
    ),
    "whole queries": (lambda q, k, v: attend(q, k, v), {"q": Q, "k": K, "v": W}, {"k": 2, "v": 2}),
    "samples": (lambda q, k, v: attend(q, k, v, is_causal=True), {"q": Q, "k": K, "v": W}, {"q": 0, "k": 0, "v": 0}),
    "heads": (lambda q, k, v: attend(q, k, v, is_causal=True), {"q": Q, "k": K, "v": W}, {"q": 1, "k": 1, "v": 1}),
    "without heads": (
        lambda q, k, v: attend(q, k, v, is_causal=True), {"q": Q[0], "k": K[0], "v": W[0]}, {"q": 1, "k": 1, "v": 1}
    ),
    "a part of the sequence": (
        lambda q, k, v: attend(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], is_causal=True), {"q": Q, "k": K, "v": W},
        {"q": 2, "k": 2, "v": 2},
    ),
    "every second query": (
        lambda q, k, v: attend(q[:, :, ::2], k, v, is_causal=True), {"q": Q, "k": K, "v": W},
        {"q": 2, "k": 2, "v": 2},
    ),
    "one sample's keys for all": (
        lambda q, k, v: attend(q, k, v), {"q": Q, "k": K[:1], "v": W[:1]}, {"q": 2, "k": 2, "v": 2}
    ),
}  # fmt: skip


@pytest.mark.parametrize("exchange", ["ring", "gather", "ulysses"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(monkeypatch: pytest.MonkeyPatch, exchange: str, kind: str) -> None:
    monkeypatch.setattr(ContextAxis, "exchange", exchange)
    function, inputs, dims = KINDS[kind]
    assert error_of(function, inputs, dims, 3 if H % 3 == 0 else 2) < 1e-12


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_multihead_attention_of_torch(weights: bool, first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(12, 3, batch_first=first).double()
    names = [name.replace(".", "_") for name, _ in layer.named_parameters()]
    parameters = dict(zip(names, layer.parameters(), strict=True))
    shape = (B, T, 12) if first else (T, B, 12)

    def function(x: Any, **own: Any) -> Any:
        given = {name.replace("_", ".", 1) if name.startswith("out") else name: value for name, value in own.items()}
        given = {name.replace("out.proj_", "out_proj."): value for name, value in given.items()}
        found, scores = torch.func.functional_call(
            layer,
            given,
            (x, x, x),
            {"attn_mask": ~CAUSAL, "key_padding_mask": ~PADDED, "need_weights": weights},
        )
        return [found, scores] if weights else found

    inputs = {"x": _random(*shape), **{name: value.detach() for name, value in parameters.items()}}
    assert error_of(function, inputs, {"x": 1 if first else 0}, 3) < 1e-12


def test_low_precision_is_as_exact_as_in_one_process() -> None:
    for dtype, limit in ((torch.bfloat16, 2e-2), (torch.float32, 1e-5)):
        given = [x.to(dtype) for x in (Q, K, W)]
        expected = attend(*given, is_causal=True)

        def rank(axis: ContextAxis, given: Any = given) -> torch.Tensor:
            found = attend(*(divided(x, 2, axis) for x in given), is_causal=True)
            assert found.dtype == given[0].dtype
            return whole(found)

        for found in on_ranks(2, rank):
            assert (found - expected).abs().max() < limit


def test_heads_that_do_not_divide_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ContextAxis, "exchange", "ulysses")

    def rank(axis: ContextAxis) -> str:
        with pytest.raises(ConfigurationError, match="6 heads do not divide by 4") as caught:
            attend(*(divided(x, 2, axis) for x in (Q, K, W)))
        return str(caught.value)

    assert "exchange=ring" in on_ranks(4, rank)[0]


@pytest.mark.parametrize("length", [T, 3])  # with 3 tokens a rank has none
def test_an_engine_on_which_all_ranks_cannot_send_at_once_shifts_by_its_all_to_all(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    plain = ContextAxis._on
    monkeypatch.setattr(ContextAxis, "_on", lambda axis, tensor: _InOrder(plain(axis, tensor)))
    inputs = {"q": Q[:, :, :length], "k": K[:, :, :length], "v": W[:, :, :length]}
    assert error_of(lambda q, k, v: attend(q, k, v, is_causal=True), inputs, dict.fromkeys(inputs, 2), 2) < 1e-12


class _InOrder(RecordingCommunicator):
    """As NCCL's is."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, messages=MessageOrder.MATCHED)

    def send(self, buffer: Buffer, *, to: int) -> Work:
        raise AssertionError("it has no messages")

    recv = send


def test_what_a_rank_does_not_get_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails where ranks attend to their own keys alone."""
    monkeypatch.setattr(ContextAxis, "start_shift", _nothing_arrives)
    inputs = {"q": Q, "k": K, "v": W}
    assert error_of(lambda q, k, v: attend(q, k, v), inputs, dict.fromkeys(inputs, 2), 2) > 1e-3


def _nothing_arrives(axis: ContextAxis, source: torch.Tensor, target: torch.Tensor) -> list[Any]:
    target.zero_()
    return []
