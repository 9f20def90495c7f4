"""Blocks between which activations are cut along the sequence, and errors of code that meets some of the tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the layers are of torch")

import torch
from torch import nn

from unidist.errors import UsageError
from unidist_tensor_parallel._torch.layers.sequence import BlockRow, _explain, find_rows
from unidist_tensor_parallel.layout.roles import Role


class Skip(torch.nn.Module):
    """Adds what is cut to what is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x[:, :3]


def test_an_error_about_sizes_says_that_tokens_are_cut_and_where() -> None:
    model = torch.nn.Sequential(Skip())
    model.register_forward_hook(_explain([BlockRow(["blocks.0", "blocks.3"], -2)]), always_call=True)
    with pytest.raises(RuntimeError, match=r"size of tensor.*sequence=true: the tokens .* 'blocks.0' to 'blocks.3'"):
        model(torch.ones(2, 6, 4))
    assert model(torch.ones(2, 3, 4)).shape == (2, 3, 4)


def test_other_errors_stay_as_they_are() -> None:
    class Raises(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise UsageError("of ours")

    model = Raises()
    model.register_forward_hook(_explain([BlockRow(["blocks.0"], -2)]), always_call=True)
    with pytest.raises(UsageError, match=r"^of ours$"):
        model(torch.ones(1))


def test_a_member_with_the_vocabulary_in_it_is_no_block() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

    model = nn.Sequential(
        nn.Sequential(nn.Embedding(6, 4), nn.Sequential(block(), block())),
        nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6)),
    )
    pairs = {f"0.1.{number}.{layer}": role for number in "01" for layer, role in (("0", Role.COLUMN), ("2", Role.ROW))}
    [row] = find_rows(model, {"0.0": Role.VOCABULARY, "1.1": Role.VOCABULARY, **pairs})
    assert list(row.paths) == ["0.1.0", "0.1.1"]
