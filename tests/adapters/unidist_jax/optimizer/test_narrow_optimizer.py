"""Optimizers of optax on parameters and state in bfloat16, and the rounding of what they have updated."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import on_one_rank

from unidist.buffer import DType
from unidist.gradients.precision import Precision, Rounding
from unidist.optim.rounding_key import RoundingKey
from unidist_jax.optimizer.leaf_piece import LeafPiece
from unidist_jax.optimizer.narrow_optimizer import for_pieces, kept_narrow
from unidist_jax.optimizer.stochastic_rounding import random_bits, round_stochastically

pytestmark = pytest.mark.parallel

KEY = RoundingKey.of("weight", 3)
NUMBER = np.uint32(7)


def narrow(plain: Any, rounding: Rounding = Rounding.STOCHASTIC) -> Any:
    """Return an optimizer whose updates all have one number."""
    kind = DType.BFLOAT16
    return kept_narrow(plain, Precision(kind, kind, kind, rounding=rounding), lambda: NUMBER)


def params() -> Any:
    """Return parameters of two shapes, and one that stays as it is."""
    values = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    return {"a": jnp.asarray(values, jnp.bfloat16), "b": jnp.ones(7, jnp.bfloat16), "c": jnp.ones(3, jnp.float32)}


@on_one_rank
def test_rounding_goes_to_a_neighbour_and_is_right_in_the_mean() -> None:
    value = np.float32(1 + 2**-7 * 0.3)  # between 1 and 1 + 2^-7
    rounded = np.asarray(round_stochastically(jnp.full(100_000, value), KEY, NUMBER), np.float32)
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert abs(rounded.mean() - value) < 3 * 2**-7 * 0.46 / 100_000**0.5
    exact = jnp.asarray([0.0, -0.0, 1.5, -3.0, np.inf, -np.inf], jnp.float32)
    np.testing.assert_array_equal(np.asarray(round_stochastically(exact, KEY, NUMBER), np.float32), exact)
    assert np.isnan(np.asarray(round_stochastically(jnp.asarray([np.nan, -np.nan]), KEY, NUMBER), np.float32)).all()


@on_one_rank
def test_numbers_depend_on_key_update_and_index_alone() -> None:
    whole = np.asarray(random_bits(1000, KEY, NUMBER, 0))
    assert whole.min() >= 0
    assert whole.max() < 1 << 16
    np.testing.assert_array_equal(random_bits(400, KEY, NUMBER, 600), whole[600:])
    for key, number in ((RoundingKey.of("weight", 4), NUMBER), (KEY, np.uint32(8))):
        other = np.asarray(random_bits(1000, key, number, 0))
        assert abs(np.corrcoef(whole, other)[0, 1]) < 0.1
    assert abs(np.corrcoef(whole[1:], whole[:-1])[0, 1]) < 0.1
    assert abs(whole.mean() - 32768) < 3 * 2**16 / (12 * 1000) ** 0.5


@on_one_rank
def test_state_is_kept_in_16_bits_where_it_is_like_a_parameter() -> None:
    optimizer = narrow(optax.inject_hyperparams(optax.adam)(1e-3))
    state = optimizer.init(params())
    adam = state.inner_state[0]
    assert {name: leaf.dtype.name for name, leaf in adam.mu.items()} == {
        "a": "bfloat16", "b": "bfloat16", "c": "float32",
    }  # fmt: skip
    assert (adam.count.dtype, state.hyperparams["learning_rate"].dtype) == (jnp.int32, jnp.float32)
    gradients = jax.tree.map(jnp.ones_like, params())
    updates, after = jax.jit(optimizer.update)(gradients, state, params())
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, state)
    new = optax.apply_updates(params(), updates)
    assert jax.tree.map(lambda leaf: leaf.dtype.name, new) == {"a": "bfloat16", "b": "bfloat16", "c": "float32"}


@on_one_rank
def test_to_the_nearest_it_is_the_update_in_float32_rounded() -> None:
    optimizer, plain = narrow(optax.adam(0.1), Rounding.NEAREST), optax.adam(0.1)
    gradients = jax.tree.map(lambda leaf: 0.3 * leaf, params())
    found = optax.apply_updates(params(), optimizer.update(gradients, optimizer.init(params()), params())[0])
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params())
    expected = optax.apply_updates(
        wide, plain.update(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients), plain.init(wide), wide)[0]
    )
    for one, other, before in zip(*map(jax.tree.leaves, (found, expected, params())), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other.astype(before.dtype)))


@on_one_rank
def test_small_updates_are_lost_to_the_nearest_and_not_in_the_mean() -> None:
    held = {"w": jnp.ones(4096, jnp.bfloat16)}
    gradients = {"w": jnp.ones(4096, jnp.bfloat16)}
    for rounding, moved in ((Rounding.NEAREST, 0.0), (Rounding.STOCHASTIC, 1e-3)):
        optimizer = narrow(optax.sgd(1e-3), rounding)
        new = optax.apply_updates(held, optimizer.update(gradients, optimizer.init(held), held)[0])
        found = 1 - float(new["w"].astype(jnp.float32).mean())
        assert abs(found - moved) < (3e-4 if moved else 1e-9), rounding


@on_one_rank
def test_a_piece_is_rounded_as_its_elements_of_the_whole_leaf() -> None:
    optimizer = narrow(optax.adam(0.1))
    gradients = jax.tree.map(lambda leaf: 0.3 * leaf, params())
    updates, state = optimizer.update(gradients, optimizer.init(params()), params())
    pieces = [LeafPiece((6, 5), 11, 9), LeafPiece((7,), 3, 4), LeafPiece((3,), 0, 3)]

    def cut(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, [piece.of(leaf) for piece, leaf in zip(pieces, leaves, strict=True)])

    placed = for_pieces(optimizer, pieces)
    own = cut(params())
    some, some_state = placed.update(cut(gradients), placed.init(own), own)
    jax.tree.map(np.testing.assert_array_equal, some, cut(updates))
    jax.tree.map(np.testing.assert_array_equal, some_state[0].mu, cut(state[0].mu))
    unplaced, _ = optimizer.update(cut(gradients), optimizer.init(own), own)
    assert any((one != other).any() for one, other in zip(*map(jax.tree.leaves, (unplaced, cut(updates))), strict=True))
