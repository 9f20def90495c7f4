"""A loss in segments gives the numbers of `jax.value_and_grad`, with few parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there

from unidist_zero._jax.stage3_segments import Leaves, MovesLeaves, SegmentedLoss  # noqa: E402 - it needs JAX

WIDTH, LAYERS = 8, 6
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Recorded(MovesLeaves):
    """Has all parameters; notes what is asked for and what comes back."""

    def __init__(self, params: Any) -> None:
        self._leaves = jax.tree.leaves(params)
        self.gathered: list[list[int]] = []
        self.taken: Leaves = {}

    def gather(self, places: Sequence[int], after: Sequence[Any]) -> Leaves:
        self.gathered.append(list(places))
        return {place: self._leaves[place] for place in places}

    def take(self, gradients: Leaves) -> None:
        assert not gradients.keys() & self.taken.keys()
        self.taken.update(gradients)


def parameters() -> Any:
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return jnp.asarray((0.5 * generator.standard_normal(shape)).astype(np.float32))

    layers = [{"bias": normal(WIDTH), "kernel": normal(WIDTH, WIDTH)} for _ in range(LAYERS)]
    return {"layers": layers, "stack": normal(3, WIDTH, WIDTH), "tied": normal(WIDTH, WIDTH), "unused": normal(2)}


X = jnp.asarray(np.random.default_rng(1).standard_normal((5, WIDTH)).astype(np.float32))


def layer(x: Any, own: Any) -> Any:
    return jnp.tanh(x @ own["kernel"].T + own["bias"])


def plain(params: Any) -> Any:
    x = X
    for own in params["layers"]:
        x = layer(x, own)
    return jnp.mean(x**2), {}


def cast_first(params: Any) -> Any:
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    x = X.astype(jnp.bfloat16)
    for own in low["layers"]:
        x = layer(x, own)
    return jnp.mean(x.astype(jnp.float32) ** 2), {}


def tied(params: Any) -> Any:
    x = X @ params["tied"]
    for own in params["layers"]:
        x = jax.nn.silu(layer(x, own))
    return jnp.mean((x @ params["tied"].T * 2.0) ** 2), {"last": x}


def called(params: Any) -> Any:
    inner = jax.jit(layer)
    x = X
    for own in params["layers"]:
        x = jax.checkpoint(inner)(x, own) + x
    return jnp.mean(x**2), {"count": jnp.arange(3), "param": params["tied"][0], "leaf": params["unused"]}


def looped(params: Any) -> Any:
    x, _ = jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), X, params["stack"])
    x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ params["tied"], lambda x: x - params["tied"][0], x)
    x = jax.lax.while_loop(lambda x: jnp.max(x) > 1e6, lambda x: x / 2, jax.lax.stop_gradient(x)) + x
    return jnp.mean(x**2), {}


def dropped(params: Any) -> Any:
    x = X
    for key, own in zip(jax.random.split(jax.random.key(0), LAYERS), params["layers"], strict=True):
        x = layer(x, own) * jax.random.bernoulli(key, 0.5, x.shape)
    order = jnp.argsort(x[:, 0])
    return jnp.mean(x[order] ** 2 * jnp.arange(5)[:, None]) + jnp.linalg.norm(params["tied"]), {}


def penalised(params: Any) -> Any:
    loss, aux = plain(params)
    return loss + 0.1 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params["layers"])), aux


FUNCTIONS: list[Callable[[Any], Any]] = [plain, cast_first, tied, called, looped, dropped, penalised]


def segmented(
    function: Callable[[Any], Any], limit: int, *, keeps: bool = False
) -> tuple[Any, Any, Recorded, SegmentedLoss]:
    params = parameters()
    moves = Recorded(params)
    loss = SegmentedLoss(function, params, limit, keeps=keeps)
    value = loss.value_and_gradients(moves)
    leaves = [
        moves.taken.get(place, np.zeros(leaf.shape, leaf.dtype)) for place, leaf in enumerate(jax.tree.leaves(params))
    ]
    return value, jax.tree.unflatten(jax.tree.structure(params), leaves), moves, loss


@pytest.mark.parametrize("limit", [1, 2 * LAYER_BYTES, 1 << 30], ids=["one leaf", "two layers", "everything"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_numbers_are_those_of_value_and_grad(function: Callable[[Any], Any], limit: int) -> None:
    wanted, gradients = jax.value_and_grad(function, has_aux=True)(parameters())
    value, found, moves, loss = segmented(function, limit)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), value, wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, gradients)
    again = loss.value(moves)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), again, wanted)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_what_is_kept_is_gathered_once(function: Callable[[Any], Any]) -> None:
    _, gradients = jax.value_and_grad(function, has_aux=True)(parameters())
    _, found, moves, _ = segmented(function, 1, keeps=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, gradients)
    places = [place for gathered in moves.gathered for place in gathered]
    assert sorted(places) == sorted(set(places))


def test_it_may_be_compiled() -> None:
    compiled = jax.jit(lambda: segmented(tied, 1)[1])()
    gradients = jax.grad(tied, has_aux=True)(parameters())[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), compiled, gradients)


@pytest.mark.parametrize("function", [plain, cast_first], ids=lambda function: function.__name__)
def test_few_parameters_are_there_at_a_time(function: Callable[[Any], Any]) -> None:
    _, _, moves, loss = segmented(function, 2 * LAYER_BYTES)
    layers = [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(LAYERS // 2)]
    assert moves.gathered == [*layers, [5, 7], [3]]  # no bias again; the last ones are still there, and X is data
    assert list(moves.taken) == [place for places in reversed(layers) for place in places]
    assert loss.ready_order()[: 2 * LAYERS] == list(moves.taken)


def test_a_parameter_that_is_used_twice_is_taken_once_it_is_complete() -> None:
    _, _, moves, loss = segmented(tied, 1)
    place = 2 * LAYERS + 1
    assert [*moves.taken][-1] == place
    assert sum(place in places for places in moves.gathered) == 2  # not for the first product again: X is data
    assert loss.segments[-1].places == [place]


@pytest.mark.parametrize("leaf", [True, False], ids=["a parameter", "a constant"])
def test_a_loss_may_be_a_parameter_or_a_constant(leaf: bool) -> None:
    params = {"a": jnp.ones(()), "b": jnp.ones(3)}
    moves = Recorded(params)
    loss = SegmentedLoss(lambda params: (params["a"] if leaf else jnp.ones(()), {}), params, 1)
    assert loss.value_and_gradients(moves)[0] == 1.0
    assert moves.taken == ({0: 1.0} if leaf else {})
    assert loss.value(moves)[0] == 1.0
