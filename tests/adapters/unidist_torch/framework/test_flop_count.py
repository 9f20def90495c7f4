"""What is counted of a GPT in PyTorch is what the formulas for its sizes say, without computing anything."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from unidist.errors import ConfigurationError
from unidist_planner.memory.source import ScriptModel
from unidist_planner.memory.transformer import Transformer
from unidist_planner.step_time.counted import work_from
from unidist_planner.step_time.transformer import TransformerWork
from unidist_torch.framework import TorchFramework
from unidist_torch.framework.flop_count import count

LAYERS, WIDTH, CODES, TIME, HEADS = 3, 32, 128, 16, 4


class Block(torch.nn.Module):
    """Attention with its matrices, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.all, self.out = (
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 3 * WIDTH),
            torch.nn.Linear(WIDTH, WIDTH),
        )
        self.second, self.up, self.down = (
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 4 * WIDTH),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, hidden: Any) -> Any:
        """Return a tensor of the same shape."""
        batch, time, _ = hidden.shape
        query, key, value = (
            part.view(batch, time, HEADS, -1).transpose(1, 2) for part in self.all(self.first(hidden)).chunk(3, -1)
        )
        weights = torch.softmax(query @ key.transpose(-1, -2), -1)
        hidden = hidden + self.out((weights @ value).transpose(1, 2).reshape(batch, time, WIDTH))
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.second(hidden))))


class GPT(torch.nn.Module):
    """A decoder, its output tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = torch.nn.Embedding(CODES, WIDTH), torch.nn.Embedding(TIME, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, CODES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, codes: Any) -> Any:
        """Return logits."""
        hidden = self.embed(codes) + self.positions(torch.arange(codes.shape[1], device=codes.device))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def test_a_gpt_is_what_its_sizes_say() -> None:
    with torch.device("meta"):
        model, codes = GPT(), torch.zeros(2, TIME, dtype=torch.int64)
    found = work_from(ScriptModel("here", TorchFramework(), model, (codes,)), 64, heads=HEADS)
    sizes = Transformer(LAYERS, WIDTH, CODES, TIME, heads=HEADS, dropout="none")
    expected = TransformerWork(sizes, 64)
    piece, right = found.forward(8, 4), expected.forward(8, 4)
    assert (piece.blocks, piece.outside, piece.border) == (right.blocks, right.outside, right.border)
    assert piece.traffic == pytest.approx(right.traffic, rel=0.1)
    assert (found.num_blocks, found.divides) == (LAYERS, {"width": WIDTH, "heads": HEADS})
    assert found.workload(1).model.parameters == expected.workload(1).model.parameters
    assert found.workload(1).model.outside == pytest.approx((CODES + TIME) * WIDTH, rel=0.02)
    assert [layer.path for layer in found.layers()] == [f"blocks.{number}" for number in range(LAYERS)]


def test_without_blocks_the_members_of_the_longest_list_are_blocks() -> None:
    layers = [torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)]
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Sequential(*layers, torch.nn.Linear(4, 4)))
    found = count(model, (torch.zeros(5, 3),))
    assert [(block.path, block.flops, block.passed) for block in found.blocks] == [
        (f"1.{number}", 2 * 5 * 4 * 4, 20.0) for number in (0, 2, 3)
    ]
    assert (found.samples, found.outside, found.widths) == (5, 2 * 5 * 3 * 4, [4])


def test_heads_are_those_of_pytorchs_attention() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2)
    found = count(model.train(), (torch.zeros(3, 5, 8),))
    assert (found.heads, [block.path for block in found.blocks]) == (2, ["layers.0", "layers.1"])


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [(torch.nn.Linear(2, 2), (torch.zeros(3, 2),), "no blocks in it"), (torch.nn.Linear(2, 2), (7,), "no samples")],
)
def test_what_cannot_be_counted_is_said(model: Any, inputs: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        count(model, inputs)
