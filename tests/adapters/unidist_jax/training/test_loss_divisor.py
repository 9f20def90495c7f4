"""Losses that are divided by a sum over the batch: found in the jaxpr, and weighted so that they are one process's."""

from __future__ import annotations

import logging
from typing import Any

import _divided_losses as divided
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import on_one_rank, runtime
from part_pools import PartOfPool

import unidist.jax as ud
from unidist_jax.training.loss_divisor import quotient
from unidist_jax.training.program_values import value_of

pytestmark = pytest.mark.parallel


def _found(loss: divided.Loss) -> tuple[Any, str]:
    given = divided.batch()
    divisor, problem = quotient(value_of(lambda params, batch: loss(params, *batch), divided.params(), given))
    return None if divisor is None else float(divisor(given)), problem


@on_one_rank
def test_a_divisor_is_found() -> None:
    for name, loss in divided.WEIGHTED.items():
        assert _found(loss) == (divided.batch()[1].sum(), ""), name


@on_one_rank
def test_a_constant_divisor_is_left_alone() -> None:
    for name, loss in divided.CONSTANT.items():
        assert _found(loss) == (None, ""), name


@on_one_rank
def test_where_no_weight_is_right_the_problem_is_said() -> None:
    for name, (loss, text) in divided.PROBLEMS.items():
        found, problem = _found(loss)
        assert found is None, name
        assert text in problem, name


def _compare(name: str, strategy: str = "data") -> None:
    step = ud.TrainStep(divided.WEIGHTED[name], divided.params(), optax.sgd(0.05), strategy)
    alone, plain = divided.params(), optax.sgd(0.05)
    state: Any = plain.init(alone)
    is_guarded = name in ("maximum", "where")
    for number, counts in enumerate(divided.COUNTS if is_guarded else divided.COUNTS[:2]):
        own = divided.batch(*counts[ud.rank()], seed=10 * number + ud.rank())
        together = divided.whole(counts, 10 * number)
        loss, gradients = jax.value_and_grad(divided.WEIGHTED[name])(alone, *together)
        np.testing.assert_allclose(step.evaluate(*own), loss, rtol=1e-12, err_msg=name)
        np.testing.assert_allclose(step(*own), loss, rtol=1e-12, err_msg=name)
        updates, state = plain.update(gradients, state, alone)
        alone = optax.apply_updates(alone, updates)
    np.testing.assert_allclose(step.params["w"], alone["w"], rtol=1e-12, err_msg=name)


def test_the_numbers_are_those_of_one_process(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            for name in divided.WEIGHTED:
                _compare(name)
            _compare("quotient", "zero=3")

    two.run(on_rank)


def test_the_advice_gives_the_numbers_of_one_process(two: PartOfPool) -> None:
    def loss(params: Any, x: Any, m: Any, divisor: Any) -> Any:
        return (divided.errors(params, x) * m).sum() / divisor

    def on_rank() -> None:
        with runtime():
            step = ud.TrainStep(loss, divided.params(), optax.sgd(0.05))
            own = divided.batch(*divided.COUNTS[1][ud.rank()], seed=ud.rank())
            divisor = ud.allreduce(jnp.asarray(own[1].sum() * 1.0), op=ud.Sum) / ud.size()
            wanted = divided.WEIGHTED["quotient"](divided.params(), *divided.whole(divided.COUNTS[1], 0))
            np.testing.assert_allclose(step(*own, divisor), wanted, rtol=1e-12)

    two.run(on_rank)


def test_a_program_over_all_ranks_has_the_numbers_of_one_process(two_of_xla: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            step = ud.TrainStep(divided.WEIGHTED["quotient"], divided.params(), optax.sgd(0.05))
            own = divided.batch(*divided.COUNTS[0][ud.rank()], seed=ud.rank())
            wanted = divided.WEIGHTED["quotient"](divided.params(), *divided.whole(divided.COUNTS[0], 0))
            np.testing.assert_allclose(step.evaluate(*own), wanted, rtol=1e-12)
            np.testing.assert_allclose(step(*own), wanted, rtol=1e-12)

    two_of_xla.run(on_rank)


def test_a_problem_is_said_once_on_rank_0(two: PartOfPool) -> None:
    def on_rank() -> list[str]:
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("unidist").addHandler(handler)
        try:
            with runtime():
                step = ud.TrainStep(divided.PROBLEMS["two divisors"][0], divided.params(), optax.sgd(0.05))
                for rows in (4, 4, 3):
                    step(*divided.batch(rows))
        finally:
            logging.getLogger("unidist").removeHandler(handler)
        return heard

    first, second = two.run(on_rank)
    assert len(first) == 1
    assert "ud.allreduce(d, op=ud.Sum)" in first[0]
    assert second == []
