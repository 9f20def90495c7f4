"""Programs evaluated on the parts of their arrays give the numbers of the whole ones, whichever dim is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from part_pools import PartOfPool, PartPools

jax = pytest.importorskip("jax", reason="the programs are JAX's")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there

import unidist.jax as ud  # noqa: E402 - it needs JAX
from unidist_tensor_parallel.layout.cuts import Cut, even  # noqa: E402

pytestmark = pytest.mark.parallel

Params = dict[str, Any]
X = np.random.default_rng(3).standard_normal((2, 6, 8))
IDS = np.array([[0, 3, 5], [7, 1, 3]])


@pytest.fixture(scope="module")
def rank_pools(jax_pools: PartPools) -> PartPools:
    """The ranks of this module, which `leak_check` asks too."""
    return jax_pools


@pytest.fixture
def two(jax_pools: PartPools) -> PartOfPool:
    return jax_pools.get(2, engine="shm")


def _attention(p: Params) -> Any:
    q, k, v = (_heads(X @ p["w"] @ jnp.eye(8, 12)) for _ in range(3))
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / 2.0
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -1e9))
    return jnp.einsum("bhqk,bhkd->bqhd", weights, v).reshape(2, 6, 12)


def _heads(x: Any) -> Any:
    return x.reshape(2, 6, 4, 3).transpose(0, 2, 1, 3)


def _scanned(p: Params) -> Any:
    def body(x: Any, row: Any) -> Any:
        x = jnp.tanh(x @ p["w"]) + row
        return x, x.sum(-1)

    x, rows = jax.lax.scan(body, X[0], p["w"])
    return jnp.sum(x**2) + jnp.sum(rows * p["v"][:6])


def _scanned_over_layers(p: Params) -> Any:
    stacked = jnp.stack([p["w"], p["w"] * 2, p["w"] + 1])
    return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), X, stacked)[0]


PROGRAMS: dict[str, Callable[[Params], Any]] = {
    "product": lambda p: X @ p["w"] + p["v"],
    "two products": lambda p: jax.nn.gelu(X @ p["w"]) @ p["w"].T,
    "relu at zero": lambda p: jax.nn.relu((X @ p["w"]) * jnp.array([0.0, 1, 1, 1, 1, 1, 1, 1])) ** 2,
    "a function with a rule of its own": lambda p: jax.nn.silu(X @ p["w"]) + jax.nn.softplus(p["v"]),
    "both sides cut": lambda p: (p["w"] * 2) @ (p["w"].T * p["v"]),
    "square": lambda p: (p["w"] @ p["w"]) @ p["v"],
    "outer product": lambda p: jnp.outer(p["v"], p["v"]) * p["w"],
    "sums": lambda p: p["w"].sum(0) + p["w"].sum(1) * p["w"].mean() + p["v"].sum(),
    "largest": lambda p: p["w"].max(0) * p["w"].max() + p["w"].min(1),
    "largest of equals": lambda p: jnp.round(p["w"]).max(0) * p["v"] + jnp.maximum(p["w"], 0).max(0),
    "smallest, product": lambda p: p["w"].min() * jnp.prod(p["w"] + 2, axis=0),
    "softmax": lambda p: jax.nn.softmax(p["w"], 0) * p["v"] + jax.nn.log_softmax(p["w"], 1),
    "log of a sum": lambda p: jax.nn.logsumexp(p["w"], 0) + jax.nn.logsumexp(p["w"], 1),
    "norm": lambda p: p["w"] / jnp.linalg.norm(p["w"], axis=0, keepdims=True) + jnp.linalg.norm(p["w"]),
    "layer norm": lambda p: (
        (p["w"] - p["w"].mean(-1, keepdims=True)) * jax.lax.rsqrt(p["w"].var(-1, keepdims=True) + 1)
    ),
    "transposed": lambda p: p["w"].T[::-1] * p["v"],
    "reshaped": lambda p: p["w"].reshape(2, 4, 4, 2).transpose(2, 0, 3, 1).reshape(4, 16) ** 2,
    "reshaped across": lambda p: p["w"].reshape(64)[:60].reshape(5, 12) ** 2,
    "parts of a dim": lambda p: jnp.split(p["w"], 2, axis=1)[1] * p["w"][:, :4] + p["w"][::2, 1:5].sum(),
    "put together": lambda p: jnp.concatenate([p["w"], p["w"] * 2], 0) @ jnp.concatenate([p["w"], X[0]], 0)[:8],
    "stacked": lambda p: jnp.stack([p["v"], p["v"] ** 2, p["w"][0]]),
    "padded": lambda p: jnp.pad(p["w"], ((1, 2), (0, 0))) @ p["w"],
    "rolled": lambda p: jnp.roll(p["w"], 1, 0) * jnp.roll(p["w"], 3, 1),
    "rows of a table": lambda p: p["w"][IDS] * p["v"],
    "rows, clipped": lambda p: jnp.take(p["w"], IDS + 4, axis=0, mode="clip"),
    "rows, filled": lambda p: jnp.take(p["w"], IDS + 4, axis=0, mode="fill", fill_value=3.0),
    "columns of a table": lambda p: p["w"][:, IDS[0]],
    "along an axis": lambda p: jnp.take_along_axis(X @ p["w"], IDS[..., :1, None].repeat(6, 1), -1),
    "one element": lambda p: p["w"][2, 5] * p["v"][7],
    "set": lambda p: p["w"].at[1].set(0.0).at[:, 2].add(p["v"]),
    "sorted": lambda p: jnp.sort(p["w"], 0) * jnp.sort(p["w"], 1),
    "cumulated": lambda p: jnp.cumsum(p["w"], 0) + jnp.cumsum(p["w"], 1) * jnp.cumsum(p["v"]),
    "convolution": lambda p: jax.lax.conv_general_dilated(
        X, p["w"][:, :, None], (1,), "SAME", dimension_numbers=("NWC", "IOW", "NWC")
    ),
    "attention": _attention,
    "einsum": lambda p: jnp.einsum("bij,jk,k->bik", X, p["w"], p["v"]),
    "batched product": lambda p: jnp.einsum("ij,ij,i->i", p["w"], p["w"] + 1, p["v"]),
    "cast": lambda p: (p["w"].astype(jnp.float32) * 2).astype(jnp.float64) * p["v"],
    "choice": lambda p: jnp.where(p["w"] > 0, p["w"], 0.1 * p["v"]),
    "clamped": lambda p: jnp.clip(p["w"], -0.5, p["v"].max()),
    "dropped": lambda p: (X @ p["w"]) * jax.random.bernoulli(jax.random.key(0), 0.5, (2, 6, 8)),
    "branch": lambda p: jax.lax.cond(p["v"][0] > 0, lambda w: w * 2, lambda w: w**2, p["w"]),
    "loop": lambda p: jax.lax.fori_loop(0, 3, lambda _, w: w @ p["w"] * 0.1, p["w"]),
    "scan": _scanned,
    "scan over layers": _scanned_over_layers,
    "checkpoint": lambda p: jax.checkpoint(lambda w, v: jnp.sin(jnp.sin(X @ w) @ w.T) * v)(p["w"], p["v"]),
    "checkpoint with a policy": lambda p: jax.checkpoint(
        lambda w: jnp.sin(jnp.sin(X @ w) @ w.T), policy=jax.checkpoint_policies.dots_saveable
    )(p["w"]),
    "inner jit": lambda p: jax.jit(lambda w, v: jnp.tanh(w * v) @ w)(p["w"], p["v"]),
    "vmap": lambda p: jax.vmap(lambda row, x: jnp.tanh(row @ p["w"]) * x)(p["w"], p["v"]),
    "a rule that needs sums": lambda p: _normalized(p["w"]) * p["v"],
    "a rule with a number that is no argument": lambda p: _scaled(p["w"]) * p["v"],
    "a gradient inside": lambda p: jax.grad(lambda w: jnp.sum(jnp.tanh(X @ w) ** 2))(p["w"]) * p["v"],
    "one result unused": lambda p: jnp.linalg.eigh(p["w"] @ p["w"].T)[0],
    "unused": lambda p: p["v"],
    "constant": lambda p: jnp.ones((2, 3)) + 0 * p["v"][0],
}


@jax.custom_jvp
def _normalized(x: Any) -> Any:
    return x / jnp.sqrt(jnp.sum(x**2))


@_normalized.defjvp
def _normalized_rule(primals: Any, tangents: Any) -> Any:
    (x,), (dx,) = primals, tangents
    size = jnp.sqrt(jnp.sum(x**2))
    return x / size, 3.0 * dx / size - x * jnp.sum(x * dx) / size**3  # not the true one, so that leaving it out shows


def _scaled(x: Any) -> Any:
    with jax.ensure_compile_time_eval():
        factor = jnp.asarray(0.7)

    @jax.custom_jvp
    def scaled(x: Any) -> Any:
        return jnp.sin(x) * factor

    @scaled.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        return scaled(*primals), 3.0 * tangents[0] * factor

    return scaled(x)


CUTS = {"uneven columns": {"w": Cut.of(1, [4, 4], 2), "v": Cut(0, ((5, 3),))}}
MORE_CUTS = {
    "rows": {"w": even(0, 8, 2), "v": even(0, 8, 2)},
    "rows alone": {"w": Cut(0, ((3, 5),))},
    "columns alone": {"w": even(1, 8, 2)},
}


@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.parametrize("cuts", CUTS)
def test_value_and_gradients_are_those_of_the_whole(two: PartOfPool, name: str, cuts: str) -> None:
    two.run(check, (name, CUTS[cuts]))


@pytest.mark.soak
@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.parametrize("cuts", MORE_CUTS)
def test_value_and_gradients_with_other_leaves_cut(two: PartOfPool, name: str, cuts: str) -> None:
    two.run(check, (name, MORE_CUTS[cuts]))


def check(name: str, cuts: dict[str, Cut]) -> None:
    from unidist.runtime import context
    from unidist_tensor_parallel._jax.axis import TensorAxis
    from unidist_tensor_parallel._jax.binding import CutTree
    from unidist_tensor_parallel._jax.roles import CutLeaf
    from unidist_tensor_parallel.layout.roles import Role

    generator = np.random.default_rng(0)
    whole = {"w": jnp.asarray(generator.standard_normal((8, 8))), "v": jnp.asarray(generator.standard_normal(8))}
    weights = jnp.asarray(np.random.default_rng(5).standard_normal(4096))

    def number(params: Params) -> Any:
        result = PROGRAMS[name](params)
        return jnp.sum(jnp.ravel(result) * weights[: result.size])

    wanted, slopes = jax.value_and_grad(number)(whole)
    ud.init()
    axis = TensorAxis(context.current().duplicate_world())
    tree = CutTree(whole, {path: CutLeaf(cut, Role.COLUMN) for path, cut in cuts.items()}, axis, reports=False)
    found, gradients = jax.jit(jax.value_and_grad(lambda held: tree.evaluate(number, held)))(tree.tree)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    for path, gradient in gradients.items():
        own = axis.own(slopes[path], cuts[path]) if path in cuts else slopes[path]
        np.testing.assert_allclose(gradient, own, rtol=1e-11, atol=1e-11, err_msg=path)
    ud.shutdown()
