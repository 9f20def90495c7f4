"""Training with the engine xla: the numbers of one process, and no call of the host in the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import recorded, runtime
from _reference import batches, check, loss_of, optimizer, parameters
from part_pools import PartOfPool, PartPools

import unidist.jax as ud
from unidist.errors import ConfigurationError, UsageError

pytestmark = pytest.mark.parallel

_STRATEGIES = ("data", "accumulate=2,clip_norm=0.1")


def _by_step(strategy: str) -> tuple[Any, list[Any]]:
    step = ud.TrainStep(loss_of, parameters(ud.rank()), optimizer(), strategy)
    own = batches(ud.rank(), ud.size())
    losses = [step(*batch) for batch in own]
    np.testing.assert_allclose(step.evaluate(*own[0]), loss_of(step.params, *batches(0, 1)[0]), rtol=1e-12)
    return step.params, losses


def _by_loop(strategy: str) -> tuple[Any, list[Any]]:
    params, bound = ud.distribute(parameters(ud.rank()), optimizer(), strategy)

    @ud.spmd
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = bound.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, ud.allreduce(loss, name="loss")

    state, losses = bound.init(params), []
    for batch in batches(ud.rank(), ud.size()):
        params, state, loss = step(params, state, *batch)
        losses.append(loss)
    return params, losses


@pytest.mark.parametrize(
    ("size", "strategy", "how"),
    [
        pytest.param(size, strategy, how, marks=[] if size == 2 and place == index else [pytest.mark.soak])
        for size in (2, 3)
        for place, strategy in enumerate(_STRATEGIES)
        for index, how in enumerate(("step", "loop"))
    ],
)
def test_training_gives_the_numbers_of_one_process(
    spmd_pools: dict[int, PartPools], size: int, strategy: str, how: str
) -> None:
    def on_rank() -> None:
        with runtime(), recorded() as calls:
            check(strategy, *(_by_step if how == "step" else _by_loop)(strategy))
            assert not calls

    spmd_pools[size].get(size).run(on_rank)


def test_a_short_window_is_applied_by_flush_and_clipped_by_value(two_of_xla: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            steps: list[int] = []
            step = ud.TrainStep(loss_of, parameters(0), optax.sgd(0.1), "accumulate=3,clip_value=0.05")
            applied = step._binding.distributed_update.applied
            monkeypatch = pytest.MonkeyPatch()
            monkeypatch.setattr(step._binding.distributed_update, "applied", lambda: steps.append(1) or applied())
            own, whole = batches(ud.rank(), 2), batches(0, 1)
            for batch in own[:3]:
                step(*batch)
            assert steps == [1]
            assert not step.flush()
            kept = jax.tree.map(np.array, step.params)
            step(*own[3])
            step(*own[0])
            assert step.flush()
            gradients = [jax.grad(loss_of)(kept, *batch) for batch in (whole[3], whole[0])]
            mean = jax.tree.map(lambda a, b: jnp.clip((a + b) / 2, -0.05, 0.05), *gradients)
            wanted = jax.tree.map(lambda p, g: p - 0.1 * g, kept, mean)
            for name, each in wanted.items():
                np.testing.assert_allclose(step.params[name], each, rtol=1e-12, atol=1e-14)
            monkeypatch.undo()

    two_of_xla.run(on_rank)


def test_sums_states_and_keys_go_through_the_step(two_of_xla: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            rank = ud.rank()

            def loss(params: Any, x: Any, *, stats: Any, key: Any) -> Any:
                return jnp.mean(x @ params["w"]), (stats + ud.rank() * 0 + jnp.mean(x), jax.random.normal(key))

            step = ud.TrainStep(loss, {"w": jnp.ones(3)}, optax.sgd(0.1), has_aux=True)
            key = jax.random.key(rank)
            found, (stats, noise) = step(np.full((2, 3), 1.0 + rank), stats=jnp.zeros(()), key=key)
            assert (found, stats, noise) == (4.5, 1.0 + rank, jax.random.normal(key))
            bound = ud.distribute(optax.sgd(1.0), op=ud.Sum)
            gradients = {"w": jnp.full(3, 1.0 + rank)}
            updates, _ = ud.spmd(bound.update)(gradients, bound.init(gradients))
            assert updates["w"].tolist() == [-3.0] * 3

    two_of_xla.run(on_rank)


def test_checkpoints_of_a_step_go_on_where_it_was(two_of_xla: PartOfPool, tmp_path: Path) -> None:
    def on_rank() -> None:
        with runtime():
            own = batches(ud.rank(), 2)
            step = ud.TrainStep(loss_of, parameters(0), optimizer(), "accumulate=2")
            for batch in own[:2]:
                step(*batch)
            ud.save(tmp_path / "run", step)
            other = ud.TrainStep(loss_of, parameters(1), optimizer(), "accumulate=2")
            ud.load(tmp_path / "run", other)
            losses = [(step(*batch), other(*batch)) for batch in own[2:]]
            assert all(first == second for first, second in losses)

    two_of_xla.run(on_rank)


def test_what_needs_another_engine_is_refused_before_the_first_step(two_of_xla: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            params, plain = parameters(0), optax.sgd(0.1)
            for strategy, text in (
                ("zero=1", "strategy 'zero' needs another engine"),
                ("zero=3", "strategy 'zero' needs another engine"),
                ("pipeline=2", "strategy 'pipeline' needs another engine"),
                ("data:compression=fp16", "data:compression=fp16 needs another engine"),
            ):
                with pytest.raises(ConfigurationError, match=text):
                    ud.TrainStep(loss_of, params, plain, strategy)
            with pytest.raises(ConfigurationError, match="elastic training needs another engine"):
                ud.TrainStep(loss_of, params, plain, elastic=True)
            for options in ({"groups": 2}, {"compression": ud.Compression.fp16}):
                with pytest.raises(ConfigurationError, match="no options of DistributedOptimizer"):
                    ud.DistributedOptimizer(plain, **options)
            bound = ud.distribute(plain)
            for run in (bound.update, jax.jit(bound.update)):
                with pytest.raises(UsageError, match=r"in a function of ud\.spmd, in place of jax\.jit"):
                    run(params, bound.init(params))

    two_of_xla.run(on_rank)
