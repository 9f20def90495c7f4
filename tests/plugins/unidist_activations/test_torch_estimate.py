"""What is estimated of a transformer is what its forward pass really keeps."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.plugins.unidist_activations._torch_memory import LiveBytes
from unidist.runtime.plugin_manager import PluginManager
from unidist_activations.strategy import Activations
from unidist_planner.memory.transformer import Transformer
from unidist_torch.framework import TorchFramework

CONTEXT = cast(Any, SimpleNamespace(topology=SimpleNamespace(rank=0), plugins=PluginManager().load()))
SIZES = Transformer(layers=4, hidden=64, vocabulary=300, sequence=48, heads=4, batch=3)


class Attention(torch.nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.inner, self.outer = torch.nn.Dropout(dropout), torch.nn.Dropout(dropout)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:  # noqa: N803 - dims: batch, sequence, hidden
        b, s, h = x_BSH.shape
        q, k, v = (part.reshape(b, s, self.heads, -1).transpose(1, 2) for part in self.qkv(x_BSH).chunk(3, -1))
        weights = self.inner(torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(h // self.heads), -1))
        return self.outer(self.out((weights @ v).transpose(1, 2).reshape(b, s, h)))


class Block(torch.nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = torch.nn.LayerNorm(hidden), Attention(hidden, heads, dropout)
        self.mlp = torch.nn.Sequential(
            torch.nn.LayerNorm(hidden),
            torch.nn.Linear(hidden, 4 * hidden),
            torch.nn.GELU(),
            torch.nn.Linear(4 * hidden, hidden),
            torch.nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Gpt(torch.nn.Module):
    def __init__(self, sizes: Transformer, dropout: float) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.words = torch.nn.Embedding(sizes.vocabulary, hidden)
        self.places = torch.nn.Embedding(sizes.sequence, hidden)
        self.dropout = torch.nn.Dropout(dropout)
        self.blocks = torch.nn.Sequential(*(Block(hidden, sizes.num_heads, dropout) for _ in range(sizes.layers)))
        self.norm, self.head = torch.nn.LayerNorm(hidden), torch.nn.Linear(hidden, sizes.vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))
        return self.head(self.norm(self.blocks(x)))


def test_parameters_are_counted_exactly() -> None:
    counted = sum(parameter.numel() for parameter in Gpt(SIZES, 0.1).parameters())
    assert SIZES.figures().parameters == counted


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize("dropout", ["floats", "none"])
def test_a_forward_pass_keeps_what_is_estimated(policy: str, dropout: str) -> None:
    sizes = Transformer(**{**vars(SIZES), "dropout": dropout})
    model = Gpt(sizes, 0.0 if dropout == "none" else 0.1)
    if policy == "recompute":
        Activations("recompute").partition(model, CONTEXT)
    tokens = torch.arange(sizes.batch * sizes.sequence).reshape(sizes.batch, -1) % sizes.vocabulary
    with LiveBytes() as live:
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        del logits
        kept = live.now()
    estimated = sizes.bytes(4)
    expected = {"keep": estimated.blocks, "recompute": estimated.block_inputs}[policy] + estimated.outside
    assert kept == pytest.approx(expected, rel=0.05 if policy == "recompute" else 0.01)
    loss.backward()


@pytest.mark.parametrize("dropout", ["floats", "none"])
def test_a_model_without_memory_is_measured_alike(dropout: str) -> None:
    sizes = Transformer(**{**vars(SIZES), "dropout": dropout})
    framework = TorchFramework()
    with framework.without_memory():
        model = Gpt(sizes, 0.0 if dropout == "none" else 0.1)
        measured = framework.activations(model, [torch.zeros(sizes.batch, sizes.sequence, dtype=torch.int64)])
    found, expected = measured.bytes(4), sizes.bytes(4)
    assert found.blocks == pytest.approx(expected.blocks, rel=0.01)
    assert found.largest_block == pytest.approx(expected.largest_block, rel=0.01)
    assert found.block_inputs == expected.block_inputs
    logits = 4 * sizes.batch * sizes.sequence * sizes.vocabulary  # the loss keeps them, which is not seen
    assert found.outside == pytest.approx(expected.outside - logits, rel=0.05)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
