"""Context parallelism in Keras on TensorFlow gives the numbers of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from part_pools import PartPools

from unidist.testing._training import largest_error
from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("tensorflow", reason="the training is in TensorFlow")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _keras_context import kinds, numbers_of, refusals

pytestmark = pytest.mark.parallel

CASES = {
    2: [
        ("blocks", "context=2,zero=1"),
        ("decoder eagerly", "context=2:exchange=gather"),
        ("vectors", "context=2:exchange=ulysses,clip_norm=100"),
        ("blocks", "context=2,activations=recompute"),  # the backward pass runs an attention again
    ],
    3: [
        ("decoder eagerly", "context=3"),
        ("graph eagerly", "context=3:exchange=ulysses"),
    ],
    4: [
        ("graph", "context=2"),
        ("decoder eagerly", "context=4"),
    ],
}


@pytest.fixture(scope="module")
def rank_pools(tensorflow_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return tensorflow_pools


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.soak) for size in (3, 4))])
def test_divided_sequences_train_like_whole_ones(rank_pool: RankPoolFactory, size: int) -> None:
    check(CASES[size], rank_pool(size).run(numbers_of, (CASES[size],)))


def check(cases: list[tuple[str, str]], ranks: list[Any]) -> None:
    """Raise AssertionError unless every rank came to the numbers of one process, with each case."""
    for case, *found in zip(cases, *ranks, strict=True):
        _, alone = found[0]
        for own, _ in found:
            assert len(own) > 4
            for number, (path, values) in enumerate(own.items()):
                other = alone[path] if path in alone else list(alone.values())[number]
                error = largest_error(values, other)
                assert error <= 1e-12, f"{case}: {path} differs by {error:.2e} from one process"


def test_layers_that_run_again_in_backward_see_their_masks_and_rows(rank_pool: RankPoolFactory) -> None:
    cases = [
        ("graph eagerly", "activations=recompute:blocks=multi_head_attention"),
        ("graph eagerly", "zero=3"),
        ("graph", "context=2,zero=3"),
    ]
    check(cases, rank_pool(2).run(numbers_of, (cases,)))


def test_layers_that_need_all_tokens_get_them(rank_pool: RankPoolFactory) -> None:
    (found,) = rank_pool(1).run(kinds)
    assert found["blocks"] == {"Places": "ALL", "Block": "COMPOSITE", "Dense": "TOKENS"}
    assert found["graph"]["Conv1D"] == found["graph"]["GlobalAveragePooling1D"] == "ALL"
    assert found["graph"]["MultiHeadAttention"] == found["graph"]["GroupedQueryAttention"] == "ATTENTION"
    assert found["vectors"]["GlobalMaxPooling1D"] == "ALL"


def test_what_cannot_be_divided_is_said(rank_pool: RankPoolFactory) -> None:
    expected = {
        "heads": "the 3 heads of",
        "options": "are for PyTorch",
        "subclassed": "has no graph of layers",
        "no attention": "no attention of Sequential",
    }
    for found in rank_pool(2).run(refusals):
        for name, text in expected.items():
            assert text in found[name], f"{name}: {found[name]}"
