"""`TrainStep`: the same as a loop, and what it and `distribute` refuse."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import on_one_rank, recorded, runtime
from part_pools import PartOfPool

import unidist.jax as ud
from unidist.errors import MismatchError, NotInitializedError, UsageError
from unidist.runtime import context

pytestmark = pytest.mark.parallel


def _loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


def _params(rank: int) -> dict[str, Any]:
    generator = np.random.default_rng(rank)
    return {"w": jnp.asarray(generator.standard_normal((3, 4))), "v": jnp.ones(4), "b": jnp.zeros(())}


def _batches(count: int, rank: int, size: int) -> list[tuple[Any, Any]]:
    generator = np.random.default_rng(9)
    x, y = generator.standard_normal((count, 4, 3)), generator.standard_normal((count, 4))
    return [(x[index, rank::size], y[index, rank::size]) for index in range(count)]


def _close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, wanted)


@pytest.mark.parametrize("strategy", ["data", "zero=1"])
def test_optax_counts_the_passes_of_an_update_itself(two: PartOfPool, strategy: str) -> None:
    def on_rank() -> None:
        with runtime():
            step = ud.TrainStep(_loss, _params(0), optax.MultiSteps(optax.adamw(0.05), 2), strategy)
            for batch in _batches(5, ud.rank(), 2):
                step(*batch)
            alone, plain = _params(0), optax.MultiSteps(optax.adamw(0.05), 2)
            state = plain.init(alone)
            for batch in _batches(5, 0, 1):
                updates, state = plain.update(jax.grad(_loss)(alone, *batch), state, alone)
                alone = optax.apply_updates(alone, updates)
            _close(step.params, alone)

    two.run(on_rank)


def test_a_step_reports_its_loss_and_its_samples(two: PartOfPool) -> None:
    def on_rank() -> tuple[float, Any]:
        with runtime():
            step = ud.TrainStep(_loss, _params(0), optax.sgd(0.05))
            loss = [step(*batch).item() for batch in _batches(3, ud.rank(), 2)][-1]
            told = context.current().progress
            return loss, (told._values, told.samples, told._num_steps)

    for loss, told in two.run(on_rank):
        assert told == ({"loss": loss}, 6, 3)


def test_a_step_does_what_a_loop_and_one_process_do(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            step = ud.TrainStep(_loss, _params(ud.rank()), optax.adamw(0.05))
            losses = [step(*batch).item() for batch in _batches(5, ud.rank(), 2)]

            params, optimizer = ud.distribute(_params(ud.rank()), optax.adamw(0.05))
            state = optimizer.init(params)

            @jax.jit
            def loop(params: Any, state: Any, x: Any, y: Any) -> Any:
                loss, gradients = jax.value_and_grad(_loss)(params, x, y)
                updates, state = optimizer.update(gradients, state, params)
                return optax.apply_updates(params, updates), state, ud.allreduce(loss)

            for wanted, batch in zip(losses, _batches(5, ud.rank(), 2), strict=True):
                params, state, loss = loop(params, state, *batch)
                np.testing.assert_allclose(loss, wanted, rtol=1e-12)
            _close(step.params, params)

            alone, plain = _params(0), optax.adamw(0.05)
            state = plain.init(alone)
            for wanted, batch in zip(losses, _batches(5, 0, 1), strict=True):
                loss, gradients = jax.value_and_grad(_loss)(alone, *batch)
                np.testing.assert_allclose(loss, wanted, rtol=1e-12)
                updates, state = plain.update(gradients, state, alone)
                alone = optax.apply_updates(alone, updates)
            _close(step.params, alone)

            batch = _batches(1, ud.rank(), 2)[0]
            evaluated = step.evaluate(*batch)
            np.testing.assert_allclose(evaluated, _loss(alone, *_batches(1, 0, 1)[0]), rtol=1e-12)
            _close(step.params, alone)  # which is not an update

    two.run(on_rank)


def test_ranks_with_batches_of_different_size_have_the_numbers_of_one_process(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            for strategy in ("data", "zero=1", "zero=3", "accumulate=2"):
                step = ud.TrainStep(_loss, _params(0), optax.sgd(0.05), strategy)
                alone, plain = _params(0), optax.sgd(0.05)
                state: Any = plain.init(alone)
                last: Any = None
                for x, y in _batches(4, 0, 1):
                    part = slice(0, 3) if ud.rank() == 0 else slice(3, 4)
                    loss, gradients = jax.value_and_grad(_loss)(alone, x, y)
                    np.testing.assert_allclose(step.evaluate(x[part], y[part]), loss, rtol=1e-12)
                    np.testing.assert_allclose(step(x[part], y[part]), loss, rtol=1e-12)
                    if strategy == "accumulate=2":
                        if last is None:
                            last = gradients
                            continue
                        gradients, last = jax.tree.map(lambda a, b: (a + b) / 2, gradients, last), None
                    updates, state = plain.update(gradients, state, alone)
                    alone = optax.apply_updates(alone, updates)
                _close(step.params, alone)

    two.run(on_rank)


def test_evaluation_weighs_samples_also_where_ranks_step_alone(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            step = ud.TrainStep(_loss, _params(0), optax.sgd(0.05), "local_sgd=4")
            x, y = _batches(1, 0, 1)[0]
            part = slice(0, 3) if ud.rank() == 0 else slice(3, 4)
            np.testing.assert_allclose(step.evaluate(x[part], y[part]), _loss(_params(0), x, y), rtol=1e-12)

    two.run(on_rank)


def test_a_deadlock_would_name_the_step(two: PartOfPool) -> None:
    def on_rank() -> list[Any]:
        from unidist.observation import stacks  # those of this process

        with runtime():
            found: list[Any] = []

            def loss(params: Any, x: Any) -> Any:
                found.extend(stacks[get_ident()])
                return jnp.mean(params["w"] * x)

            step = ud.TrainStep(loss, {"w": jnp.ones(())}, optax.sgd(0.1))
            step(jnp.ones(2))
            step.evaluate(jnp.ones(2))
            return found

    for found in two.run(on_rank):
        assert "train_step()" in found
        assert "train_step.evaluate()" in found


def test_a_short_window_is_applied_by_flush(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            step = ud.TrainStep(_loss, _params(0), optax.sgd(0.1), strategy="accumulate=3")
            batches = _batches(5, ud.rank(), 2)
            for batch in batches[:3]:
                before = jax.tree.map(np.array, step.params)
                step(*batch)
            assert any((np.asarray(step.params[name]) != before[name]).any() for name in before)
            _, whole = _params(0), _batches(5, 0, 1)
            for batch in batches[3:]:
                step(*batch)
            kept = jax.tree.map(np.array, step.params)
            assert step.flush()
            gradients = [jax.grad(_loss)(kept, *batch) for batch in whole[3:]]
            mean = jax.tree.map(lambda a, b: (a + b) / 2, *gradients)
            _close(step.params, jax.tree.map(lambda p, g: p - 0.1 * g, kept, mean))
            assert not step.flush()
            step(*batches[0])  # goes on with a window of its own

    two.run(on_rank)


def test_an_error_within_a_step_is_our_own(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():

            def loss(params: Any, x: Any) -> Any:
                return jnp.mean(ud.allreduce(x, name="activation") * params["w"])

            step = ud.TrainStep(loss, {"w": jnp.ones(())}, optax.sgd(0.1))
            step(jnp.ones(2))
            step(jnp.ones(2))
            with pytest.raises(MismatchError, match="'activation'"):
                step.evaluate(jnp.ones(2 + ud.rank()))
            step(jnp.ones(2))
            kept = jax.tree.map(np.array, (step.params, step.opt_state))
            with pytest.raises(MismatchError, match="'activation'"):
                step(jnp.ones(2 + ud.rank()))
            with pytest.raises(UsageError, match="the parameters are gone: an earlier step"):
                step(jnp.ones(2))
            step.params, step.opt_state = kept
            assert step(jnp.ones(2)).item() == kept[0]["w"]

    two.run(on_rank)


def test_other_shapes_are_compiled_again_and_old_parameters_are_donated(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime(), recorded() as calls:
            own = _params(0)
            step = ud.TrainStep(_loss, own, optax.sgd(0.1))
            for count in (2, 3, 2):
                before = step.params
                step(jnp.ones((count, 3)), jnp.ones(count))
                with pytest.raises(UsageError, match="was donated"):
                    ud.allreduce(before)
            assert [call for call in calls if "allreduce" in call] == ["allreduce 'loss of a training step'"] * 3
            assert own["w"].shape == (3, 4)
            assert not own["w"].is_deleted()  # the script's own arrays are not given away

    two.run(on_rank)


@on_one_rank
def test_says_what_it_cannot_train() -> None:
    params = {"w": jnp.ones(2)}
    with pytest.raises(NotInitializedError):
        ud.TrainStep(lambda p: p["w"].sum(), params, optax.sgd(0.1))
    with runtime():
        for loss, text in (
            (lambda p: p["w"], r"loss_fn returned float64\[2\]"),
            (lambda p: jnp.argmax(p["w"]), r"loss_fn returned int64\[\]"),
            (lambda p: (p["w"].sum(), 1), "loss_fn returned a tuple of 2 values"),
            (lambda p: None, "loss_fn returned a NoneType of 0 values"),
        ):
            step = ud.TrainStep(loss, params, optax.sgd(0.1))
            for call in (step, step.evaluate):
                with pytest.raises(UsageError, match=text):
                    call()
        with pytest.raises(UsageError, match="the gradient of 'n' is of int"):
            ud.TrainStep(lambda p: p["w"].sum(), {**params, "n": jnp.arange(2)}, optax.sgd(0.1))()
        for optimizer in (lambda x: x, "sgd", (1, 2)):
            with pytest.raises(UsageError, match="is no optimizer of optax"):
                ud.TrainStep(lambda p: p["w"].sum(), params, optimizer)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="is no optimizer of optax"):
                ud.distribute(optimizer)  # type: ignore[call-overload]
        bound = ud.distribute(optax.sgd(0.1))
        for again in (lambda: ud.distribute(bound), lambda: ud.TrainStep(lambda p: p["w"].sum(), params, bound)):
            with pytest.raises(UsageError, match="is distributed already"):
                again()
        with pytest.raises(UsageError, match="it was given 4"):
            ud.distribute(params, optax.sgd(0.1), "", 3)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="groups="):
            ud.DistributedOptimizer(optax.sgd(0.1), groups=[[params["w"]]])
        with pytest.raises(UsageError, match="Average or Sum, not Max"):
            ud.DistributedOptimizer(optax.sgd(0.1), op=ud.Max)


@on_one_rank
def test_a_strategy_that_chooses_types_needs_the_step() -> None:
    from unidist.errors import ConfigurationError

    with runtime(), pytest.raises((UsageError, ConfigurationError), match=r"precision|TrainStep"):
        ud.distribute({"w": jnp.ones(2)}, optax.sgd(0.1), "precision=bf16")


@on_one_rank
def test_the_facade_has_what_it_lists() -> None:
    assert set(ud.__all__) == {name for name in ud.__all__ if hasattr(ud, name)}
    with runtime():
        assert (ud.rank(), ud.size(), ud.local_rank(), ud.data_size()) == (0, 1, 0, 1)
        memory = ud.empty((2, 3), np.int32)
        assert (memory.shape, memory.dtype, memory.any()) == ((2, 3), np.int32, False)
        assert ud.empty(4, jnp.bfloat16).shape == (4,)
        assert ud.device().platform == "cpu"
        key = ud.seed(3)
        assert jax.random.key_data(key).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
        assert ud.buffer(jnp.arange(3.0)).count == 3
        assert ud.allreduce(jnp.arange(3.0)).tolist() == [0.0, 1.0, 2.0]  # alone
        assert jax.jit(ud.allgather)(jnp.ones((2, 1))).shape == (2, 1)
        assert jax.jit(lambda x: ud.alltoall(ud.reducescatter(x)))(jnp.ones(2)).tolist() == [1.0, 1.0]
    memory[0, 0] = 1  # stays valid
    ud.shutdown()  # once more does nothing
