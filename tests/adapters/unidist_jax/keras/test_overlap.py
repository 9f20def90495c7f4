"""When the gradients of Keras on JAX go out: in the backward pass, where nobody changes them afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import keras
import numpy as np
import pytest
from _keras_training import alone, by_batches, by_fit, loss, network, runtime, values
from part_pools import PartOfPool

import unidist.keras as ud
from unidist.errors import UsageError
from unidist_jax.optimizer import exchange

pytestmark = pytest.mark.parallel


class Doubling(keras.Sequential):
    """A script's train step, which changes the gradients before the optimizer gets them."""

    def train_step(self, state: Any, data: Any) -> Any:
        trainable, non_trainable, optimizer_state, metrics = state
        gradients, (_, _, non_trainable, metrics) = jax.grad(self.compute_loss_and_updates, has_aux=True)(
            trainable, non_trainable, metrics, *data, None, training=True, optimizer_variables=optimizer_state
        )
        doubled = [2.0 * gradient for gradient in gradients]
        trainable, optimizer_state = self.optimizer.stateless_apply(optimizer_state, doubled, trainable)
        return {}, (trainable, non_trainable, optimizer_state, metrics)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Count the gradients of each call that takes some in the backward pass."""
    counts: list[int] = []
    run = exchange._TakeEarly.run

    def counted(self: Any, operands: Any, results: Any) -> None:
        counts.append(len(operands))
        run(self, operands, results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange._TakeEarly, "run", counted)
        yield counts


@pytest.mark.parametrize("strategy", ["data", "accumulate=2", "zero=1", "zero=2,clip_norm=0.1"])
@pytest.mark.parametrize("way", [by_fit, by_batches])
def test_gradients_of_keras_own_step_go_out_early(two: PartOfPool, strategy: str, way: Any) -> None:
    def on_rank() -> None:
        with counting() as counts, runtime():
            model, optimizer = ud.distribute(network(), keras.optimizers.SGD(0.1), strategy)
            way(model, optimizer)
            assert counts == [len(model.trainable_variables)] * 8

    two.run(on_rank)


def test_a_train_step_that_changes_gradients_keeps_them(two: PartOfPool) -> None:
    def on_rank() -> None:
        with counting() as counts, runtime():
            model = Doubling(network().layers)
            model.build((None, 6))
            model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1))
            first = values(model)
            by_fit(model, optimizer)
            assert not counts
            for own, wanted in zip(values(model), alone(first, keras.optimizers.SGD(0.2)), strict=True):
                np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-12)

    two.run(on_rank)


def test_a_step_that_fails_leaves_no_gradients_taken(two: PartOfPool) -> None:
    def on_rank() -> None:
        with counting() as counts, runtime():
            model, optimizer = ud.distribute(network(), keras.optimizers.SGD(0.1))
            model.compile(optimizer, loss(), run_eagerly=True)
            with pytest.raises(Exception, match=r"(?i)shape|rank|logits|dimension"):
                model.train_on_batch(np.ones((2, 6)), np.ones((2, 7, 5)))
            assert not optimizer._unidist._early
            first = values(model)
            by_fit(model, optimizer)
            assert len(counts) == 8
            for own, wanted in zip(values(model), alone(first, keras.optimizers.SGD(0.1)), strict=True):
                np.testing.assert_allclose(own, wanted, rtol=0, atol=1e-12)

    two.run(on_rank)


def test_gradients_that_left_without_their_weight_are_an_error(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            model, optimizer = ud.distribute(network(), keras.optimizers.SGD(0.1))
            optimizer._unidist.weighted = lambda loss: loss  # as if Keras' step did not call `scale_loss`
            with pytest.raises(UsageError, match="does not scale its loss by the optimizer"):
                by_batches(model, optimizer)

    two.run(on_rank)
