"""What the leaves of an optimizer state are is found by its structure alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest
from _programs import on_one_rank

from unidist.checkpoint.format.slots import OPTAX
from unidist_jax.checkpoint.layout import layout_of

pytestmark = pytest.mark.parallel

LABELS = {"dense": {"w": "a", "b": "b"}, "s": "a"}


def params() -> Any:
    return {"dense": {"w": jnp.ones((3, 4)), "b": jnp.zeros(4)}, "s": jnp.ones(())}


@on_one_rank
@pytest.mark.parametrize(
    ("make", "kinds", "slots", "others"),
    [
        (lambda: optax.adamw(0.1), ["ScaleByAdamState"], ["mu", "nu"], ["0/count"]),
        (lambda: optax.sgd(0.1), ["TraceState"], [], []),
        (lambda: optax.sgd(0.1, momentum=0.9), ["TraceState"], ["trace"], []),
        (lambda: optax.rmsprop(0.1, momentum=0.9), ["ScaleByRmsState", "TraceState"], ["nu", "trace"], []),
        (lambda: optax.rmsprop(0.1, centered=True), ["ScaleByRStdDevState"], ["mu", "nu"], []),
        (lambda: optax.adagrad(0.1), ["ScaleByRssState"], ["sum_of_squares"], []),
        (lambda: optax.adadelta(0.1), ["ScaleByAdaDeltaState"], ["e_g", "e_x"], []),
        (lambda: optax.lion(0.1), ["ScaleByLionState"], ["mu"], ["0/count"]),
        (lambda: optax.amsgrad(0.1), ["ScaleByAmsgradState"], ["mu", "nu", "nu_max"], ["0/count"]),
        (
            lambda: optax.MultiSteps(optax.adam(0.1), 2),
            ["ScaleByAdamState", "MultiStepsState"],
            ["acc_grads", "mu", "nu"],
            ["gradient_step", "inner_opt_state/0/count", "mini_step"],
        ),
        (
            lambda: optax.masked(optax.adam(0.1), {"dense": {"w": True, "b": False}, "s": True}),
            ["ScaleByAdamState"],
            ["mu", "nu"],
            ["inner_state/0/count"],
        ),
        (
            lambda: optax.chain(optax.trace(0.9), optax.trace(0.5)),
            ["TraceState"],
            ["0.trace", "1.trace"],
            [],
        ),
        # Two kinds at once are of no family, nor are fields of the same name that mean something else.
        (
            lambda: optax.multi_transform({"a": optax.adam(0.1), "b": optax.sgd(0.1, momentum=0.9)}, LABELS),
            ["ScaleByAdamState and TraceState"],
            ["mu", "nu", "trace"],
            ["inner_states/a/inner_state/0/count"],
        ),
        (lambda: optax.contrib.muon(0.1), ["MuonState and ScaleByAdamState"], ["mu", "nu"], None),
    ],
)
def test_leaves_are_named_by_the_fields_and_classes_of_their_tuples(
    make: Any, kinds: list[str], slots: list[str], others: list[str] | None
) -> None:
    tree = params()
    layout = layout_of(tree, make().init(tree))
    assert (layout.naming.dialect, list(layout.naming.kinds)) == (OPTAX, kinds)
    assert sorted({slot.slot for slot in layout.slots}) == slots
    if others is not None:
        assert sorted(layout.others) == others


@on_one_rank
def test_parameters_that_are_one_array_have_slots_too() -> None:
    weights = jnp.ones((2, 3))
    layout = layout_of(weights, optax.adam(0.1).init(weights))
    assert [(slot.parameter, slot.slot) for slot in layout.slots] == [(0, "mu"), (0, "nu")]
    assert list(layout.others) == ["0/count"]


@on_one_rank
def test_counts_and_the_learning_rate_are_found() -> None:
    tree = params()
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=optax.linear_schedule(0.1, 0.0, 10))
    layout = layout_of(tree, optimizer.init(tree))
    names = {position: path for path, position in layout.others.items()}
    assert [names[position] for position in layout.rates] == ["hyperparams/learning_rate"]
    assert {"count", "inner_state/0/count"} <= {names[position] for position in layout.counts}
    assert {slot.count for slot in layout.slots} == {layout.others["inner_state/0/count"]}
    muon = optax.inject_hyperparams(optax.contrib.muon)(learning_rate=0.1, adam_learning_rate=0.2)
    assert layout_of(tree, muon.init(tree)).rates == []  # none that all parameters have
