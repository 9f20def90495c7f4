"""Roles of a user's plan as cuts of the leaves of a tree."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist_tensor_parallel._jax.roles import cuts_of
from unidist_tensor_parallel.layout.cuts import Cut, even
from unidist_tensor_parallel.layout.roles import check_roles

FLAX_ATTENTION = {
    "attention/query/kernel": (8, 4, 2),
    "attention/query/bias": (4, 2),
    "attention/key/kernel": (8, 4, 2),
    "attention/key/bias": (4, 2),
    "attention/value/kernel": (8, 4, 2),
    "attention/value/bias": (4, 2),
    "attention/out/kernel": (4, 2, 8),
    "attention/out/bias": (8,),
}


def cuts(shapes: dict[str, tuple[int, ...]], plan: dict[str, str], size: int = 2) -> dict[str, Cut]:
    return {path: leaf.cut for path, leaf in cuts_of(shapes, check_roles(plan), size).items()}


def test_a_pair_of_dense_layers() -> None:
    shapes = {"up/kernel": (6, 8), "up/bias": (8,), "down/kernel": (8, 6), "down/bias": (6,), "norm/scale": (6,)}
    found = cuts(shapes, {"up": "column", "down": "row"})
    assert found == {"up/kernel": even(1, 8, 2), "up/bias": even(0, 8, 2), "down/kernel": even(0, 8, 2)}


def test_weights_of_equinox_have_their_outputs_first() -> None:
    shapes = {"layers/0/weight": (8, 6), "layers/0/bias": (8,), "layers/1/weight": (6, 8), "layers/1/bias": (6,)}
    found = cuts(shapes, {"layers.0": "column", "layers.1": "row"})
    assert found == {"layers/0/weight": even(0, 8, 2), "layers/0/bias": even(0, 8, 2), "layers/1/weight": even(1, 8, 2)}


def test_stacked_layers_are_cut_in_each_row() -> None:
    shapes = {"blocks/up/kernel": (3, 6, 8), "blocks/up/bias": (3, 8), "blocks/down/kernel": (3, 8, 6)}
    found = cuts(shapes, {"blocks.up": "column", "blocks.down": "row"})
    assert found == {
        "blocks/up/kernel": even(2, 8, 2),
        "blocks/up/bias": even(1, 8, 2),
        "blocks/down/kernel": even(1, 8, 2),
    }


def test_a_fused_projection_is_cut_in_three() -> None:
    found = cuts({"qkv/kernel": (6, 12), "qkv/bias": (12,)}, {"qkv": "qkv"})
    assert found == {"qkv/kernel": Cut.of(1, [4, 4, 4], 2), "qkv/bias": Cut.of(0, [4, 4, 4], 2)}


@pytest.mark.parametrize("role", ["column", "column_gather", "row", "heads", "qkv", "vocabulary"])
def test_a_single_number_is_whole(role: str) -> None:
    assert list(cuts({"up/kernel": (6, 12), "up/factor": ()}, {"up": role})) == ["up/kernel"]
    assert cuts({"factor": (), "up/kernel": (6, 12)}, {"factor": role, "up": "column"}) == {"up/kernel": even(1, 12, 2)}


def test_the_heads_of_an_attention_of_flax() -> None:
    found = cuts(FLAX_ATTENTION, {"attention": "attention"})
    assert found["attention/query/kernel"] == even(1, 4, 2)
    assert found["attention/value/bias"] == even(0, 4, 2)
    assert found["attention/out/kernel"] == even(0, 4, 2)
    assert "attention/out/bias" not in found


def test_a_vocabulary_is_the_largest_dim() -> None:
    found = cuts({"embed/embedding": (50, 8), "head/kernel": (8, 50), "head/bias": (50,)}, {"**": "vocabulary"})
    assert found == {"embed/embedding": even(0, 50, 2), "head/kernel": even(1, 50, 2)}


def test_a_leaf_may_be_named_by_itself_and_replicate_leaves_it_whole() -> None:
    found = cuts({"a": (4, 8), "b": (8, 4), "c": (4, 4)}, {"a": "column", "c": "replicate", "*": "row"})
    assert found == {"a": even(1, 8, 2), "b": even(0, 8, 2)}


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"nowhere": "row"}, "matches no layer"),
        ({"up": "sequence"}, "not for JAX"),
        ({"up": "qkv"}, "do not divide into queries"),
        ({"up": "attention"}, "no attention whose kernels"),
        ({"narrow": "column"}, "there are only 1"),
    ],
)
def test_what_cannot_be_cut_is_refused(plan: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        cuts({"up/kernel": (6, 8), "up/bias": (8,), "narrow/kernel": (8, 1)}, plan)
