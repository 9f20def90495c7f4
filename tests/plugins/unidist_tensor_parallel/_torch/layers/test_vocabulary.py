"""Embeddings whose vocabulary is divided over ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from unidist_tensor_parallel._torch.layers.vocabulary import cut_embedding
from unidist_tensor_parallel.layout.cuts import even


@pytest.mark.parametrize("padding", [1, 4])
def test_the_row_of_the_padding_has_no_gradient_on_the_rank_that_has_it(padding: int) -> None:
    cut = even(0, 6, 2)
    ids = torch.arange(6)
    grads = []
    for rank in range(2):
        layer = torch.nn.Embedding(3, 2)  # this rank's rows of six
        layer.padding_idx = padding
        axis = SimpleNamespace(rank=rank, leave=lambda rows: rows)
        cut_embedding(layer, cut, SimpleNamespace(axis=axis))
        layer(ids).sum().backward()
        grads.append(layer.weight.grad)
    expected = torch.ones(6, 2)
    expected[padding] = 0
    assert torch.equal(torch.cat(grads), expected)
