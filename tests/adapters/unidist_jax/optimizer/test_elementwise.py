"""Optimizers of optax are told apart by trying them on small leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402 - after JAX is known to be there
import optax  # noqa: E402 - it needs JAX
from optax import contrib  # noqa: E402

from unidist.errors import UsageError  # noqa: E402
from unidist_jax.optimizer import needs_whole_leaves  # noqa: E402


def tree() -> Any:
    return {
        "a": jnp.zeros((300, 200)),
        "d": jnp.zeros((5, 6)),
        "b": [jnp.zeros(7), jnp.zeros(())],
        "c": jnp.zeros((3, 5, 4)),
    }


def normed(leaf: Any) -> Any:
    return leaf / jnp.linalg.norm(leaf)


RULES: dict[str, Callable[[Any, Any], Any]] = {
    "many elements": lambda leaf, step: normed(leaf) if leaf.size >= 4096 else leaf,
    "three dims": lambda leaf, step: normed(leaf) if leaf.ndim > 2 else leaf,
    "from step 6 on": lambda leaf, step: jnp.where(step > 5, normed(leaf), leaf),
    "from step 500 on": lambda leaf, step: jnp.where(step > 500, normed(leaf), leaf),
    "every fifth step": lambda leaf, step: jnp.where(step % 5 == 0, normed(leaf), leaf),
}
"""Each looks at whole leaves, but at some of them or in some steps only."""


def ruled(rule: Callable[[Any, Any], Any]) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        step = state.count + 1
        return jax.tree.map(lambda leaf: -0.1 * rule(leaf, step), updates), optax.ScaleByScheduleState(step)

    return optax.GradientTransformation(lambda _: optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)), update)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_for_some_leaves_or_some_steps_is_found(rule: str) -> None:
    assert asked(ruled(RULES[rule]))


def test_it_is_found_under_a_schedule_that_has_ended_then() -> None:
    schedule = optax.linear_schedule(1.0, 0.0, 2_000)
    assert asked(optax.chain(ruled(RULES["from step 500 on"]), optax.scale_by_schedule(schedule)))


def asked(optimizer: optax.GradientTransformation) -> bool:
    return needs_whole_leaves(optax.with_extra_args_support(optimizer), tree())


def by_dimensions(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.sgd(0.1, momentum=0.9),
        lambda: optax.adamw(1e-3, mask=by_dimensions),
        lambda: optax.chain(optax.clip(1.0), optax.adam(optax.linear_schedule(0.0, 1e-3, 1000))),
        lambda: optax.multi_transform(
            {"x": optax.adam(1e-3), "y": optax.set_to_zero()}, {"a": "x", "b": ["y", "x"], "c": "x", "d": "y"}
        ),
    ],
    ids=["momentum", "masked decay", "schedule", "labels"],
)
def test_what_treats_elements_by_themselves_may_be_cut_anywhere(make: Callable[[], Any]) -> None:
    assert not asked(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.lamb(1e-3),
        lambda: optax.chain(optax.scale_by_factored_rms(), optax.scale(-1e-3)),
        lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=4),
        lambda: optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(1e-3)),
        lambda: optax.noisy_sgd(1e-3, key=jax.random.key(0)),
    ],
    ids=["norm of a leaf", "factors of large matrices", "factors", "clipping by leaf", "noise"],
)
def test_what_looks_at_a_leaf_gets_it_as_a_whole(make: Callable[[], Any]) -> None:
    assert asked(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.chain(optax.clip_by_global_norm(1000.0), optax.adam(1e-3)),
        lambda: optax.chain(optax.adam(1e-3), optax.clip_by_global_norm(1e-4)),
        contrib.prodigy,
    ],
    ids=["gradients", "updates", "estimated rate"],
)
def test_what_looks_at_all_leaves_together_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match=r"all parameters together .*--strategy zero=1,clip_norm="):
        asked(make())


@pytest.mark.parametrize("limit", [1e-3, 1.0, 100.0, 1e5])
@pytest.mark.parametrize("leaves", [{"a": (3,), "b": (2, 2)}, {"a": (2,)}], ids=["two leaves", "one leaf"])
def test_a_global_norm_is_found_whatever_its_limit(leaves: dict[str, tuple[int, ...]], limit: float) -> None:
    chain = optax.chain(optax.clip_by_global_norm(limit), optax.adam(0.1))
    optimizer = optax.with_extra_args_support(chain)
    params = {name: jnp.zeros(shape) for name, shape in leaves.items()}
    if len(leaves) > 1:
        with pytest.raises(UsageError, match="all parameters together"):
            needs_whole_leaves(optimizer, params)
    else:  # the norm of all is that of the one
        assert needs_whole_leaves(optimizer, params)


def test_what_needs_more_than_gradients_is_refused() -> None:
    with pytest.raises(UsageError, match=r"could not be tried on small arrays.*value_fn.*zero:whole=true"):
        asked(optax.lbfgs())


def test_an_optimizer_that_no_program_can_hold_is_tried_at_once() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        largest = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(updates))
        return jax.tree.map(lambda leaf: leaf * (1.0 if largest > 0 else 0.0), updates), state

    assert not asked(optax.GradientTransformation(lambda params: optax.EmptyState(), update))


def test_it_may_be_asked_while_a_function_is_traced() -> None:
    answers = []
    jax.jit(lambda x: answers.append(asked(optax.adam(1e-3))) or x)(1.0)
    assert answers == [False]
