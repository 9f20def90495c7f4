"""`save` and `load` of trees: any number of ranks, any strategy, and what does not fit is an error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import on_one_rank, runtime
from part_pools import PartPools

import unidist.jax as ud
from unidist.errors import CheckpointError, UsageError
from unidist.settings.environment import set_variables

pytestmark = pytest.mark.parallel

BATCH, STEPS = 12, 3
CUT = "tensor=2:plan=dense.w=column+dense.b=column+out=row"


def loss_fn(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["dense"]["w"] + params["dense"]["b"])
    return jnp.mean((hidden @ params["out"] * params["scale"] - jnp.sin(x.sum(1))) ** 2)


def fresh(seed: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {
        "dense": {"w": jnp.asarray(generator.standard_normal((5, 7))), "b": jnp.zeros(7)},
        "out": jnp.asarray(generator.standard_normal(7)),
        "scale": jnp.ones((1,)),
    }


def batch(step: int) -> Any:
    return np.random.default_rng(100 + step).standard_normal((BATCH, 5))[ud.data_rank() :: ud.data_size()]


def plain(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def close(found: Any, wanted: Any) -> None:
    for one, other in zip(plain(found), plain(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def same(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(plain(found), plain(wanted), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(0.02),
    "momentum": lambda: optax.chain(optax.add_decayed_weights(1e-3), optax.sgd(0.05, momentum=0.9)),
    "schedule": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.01, 9)),
    "lamb": lambda: optax.lamb(0.02),
}


def train(by: str, optimizer: str, strategy: str, loads: str, saves: str, steps: range) -> list[Any]:
    """Train from a checkpoint to another one, with a loop or a step; return all parameters."""
    with set_variables({"UNIDIST_STRATEGY": strategy}), runtime():
        made = OPTIMIZERS[optimizer]()
        start = fresh(99 if loads else 0)
        if by == "step":
            step = ud.TrainStep(loss_fn, start, made)
            if loads:
                ud.load(loads, step)
            for number in steps:
                step(batch(number))
            if saves:
                ud.save(saves, step)
            return plain(step.params)
        params, bound = ud.distribute(start, made)
        state = bound.init(params)
        if loads:
            loaded = ud.load(loads, params, state, optimizer=bound)
            params, state = loaded.params, loaded.opt_state

        @jax.jit
        def update(params: Any, state: Any, x: Any) -> Any:
            updates, state = bound.update(jax.grad(loss_fn)(params, x), state, params)
            return optax.apply_updates(params, updates), state

        for number in steps:
            params, state = update(params, state, batch(number))
        if saves:
            ud.save(saves, params, state, optimizer=bound)
        return plain(params)


@pytest.mark.parametrize(
    ("optimizer", "parts"),
    [
        ("adamw", [("step", "data", 2), ("loop", "data", 1), ("step", "data", 3)]),
        ("adamw", [("loop", "zero=1", 3), ("step", "zero=2", 2), ("loop", "data", 2)]),
        ("momentum", [("step", "data", 2), ("loop", "zero=1", 3), ("step", "zero=1", 2)]),
        ("schedule", [("step", "zero=2", 2), ("loop", "data", 1), ("step", "zero=1", 3)]),
        ("lamb", [("step", "zero=1", 2), ("step", "zero=1", 3), ("loop", "data", 1)]),
        ("adamw", [("step", "zero=3", 3), ("step", "zero=1", 2), ("step", "zero=3", 2), ("loop", "data", 1)]),
        ("momentum", [("step", CUT, 2), ("step", "zero=3", 2), ("step", CUT, 2), ("loop", "data", 1)]),
    ],
)
def test_training_goes_on_with_other_ranks_and_strategies_as_if_it_had_not_stopped(
    jax_pools: PartPools, tmp_path: Path, optimizer: str, parts: list[tuple[str, str, int]]
) -> None:
    [wanted] = jax_pools.get(1).run(train, ("loop", optimizer, "data", "", "", range(STEPS * len(parts))))
    found: list[Any] = []
    for number, (by, strategy, size) in enumerate(parts):
        loads = str(tmp_path / str(number - 1)) if number else ""
        steps = range(STEPS * number, STEPS * (number + 1))
        arguments = (by, optimizer, strategy, loads, str(tmp_path / str(number)), steps)
        found = jax_pools.get(size, engine="shm").run(train, arguments)
    for params in found:
        close(params, wanted)


def test_pieces_of_all_ranks_make_whole_tensors(jax_pools: PartPools, tmp_path: Path) -> None:
    path = str(tmp_path / "zero")
    jax_pools.get(3, engine="shm").run(train, ("step", "adamw", "zero=1", "", path, range(2)))

    def on_rank() -> None:
        with runtime():
            optimizer, params = OPTIMIZERS["adamw"](), fresh()
            state = optimizer.init(params)
            for number in range(2):
                updates, state = optimizer.update(jax.grad(loss_fn)(params, batch(number)), state, params)
                params = optax.apply_updates(params, updates)
            loaded = ud.load(path, fresh(1), optimizer.init(fresh(1)))
            close((loaded.params, loaded.opt_state), (params, state))
            assert loaded.facts["world_size"] == 3

    jax_pools.get(1).run(on_rank)


def test_a_shard_without_its_optimizer_is_an_error_on_every_rank(jax_pools: PartPools, tmp_path: Path) -> None:
    def on_rank(path: str) -> None:
        with runtime():
            for strategy in ("zero=1", "zero=1:whole=true"):
                params, bound = ud.distribute(fresh(), optax.lion(0.1), strategy=strategy)
                with pytest.raises(CheckpointError, match=r"optimizer=|describe one tensor"):
                    _raising(lambda: ud.save(path, params, bound.init(params)))  # noqa: B023 - it is called here
            assert not Path(path).exists()

    jax_pools.get(2, engine="shm").run(on_rank, (str(tmp_path / "shard"),))


def _raising(call: Callable[[], object]) -> None:
    """Raise what a call raises; CheckpointError on the rank that is at fault, too."""
    try:
        call()
    except UsageError as exc:
        raise CheckpointError(str(exc)) from exc


@on_one_rank
def test_trees_come_back_bit_by_bit_with_other_leaves_left_alone(tmp_path: Path) -> None:
    with runtime():
        params = {
            "half": jnp.arange(3, dtype=jnp.bfloat16),
            "numbers": [jnp.arange(4), np.float32([1.5])],
            "key": jax.random.key(5),
            "flags": jnp.array([True, False]),
            "empty": jnp.zeros((0, 3)),
            "activation": jnp.tanh,
        }
        extra = {"epoch": 7, "key": jax.random.key_data(jax.random.key(3)), "history": [0.5, {"a": None}]}
        ud.save(tmp_path / "run", params, extra=extra, step=4)
        given = jax.tree.map(lambda leaf: leaf * 0 if isinstance(leaf, np.ndarray) else leaf, params)
        loaded = ud.load(tmp_path / "run", {**given, "half": jnp.ones(3, jnp.bfloat16), "key": jax.random.key(0)})
        assert loaded.params["activation"] is jnp.tanh
        assert loaded.params["half"].dtype == jnp.bfloat16
        assert (jax.random.key_data(loaded.params["key"]) == jax.random.key_data(jax.random.key(5))).all()
        assert loaded.params["empty"].shape == (0, 3)
        assert loaded.params["numbers"][1].tolist() == [1.5]
        assert loaded.params["flags"].tolist() == [True, False]
        assert (loaded.step, loaded.opt_state) == (4, None)
        assert loaded.extra["epoch"] == 7
        assert loaded.extra["history"] == [0.5, {"a": None}]
        key = jax.random.wrap_key_data(loaded.extra["key"])
        assert jax.random.normal(key) == jax.random.normal(jax.random.key(3))


@on_one_rank
def test_types_stand_for_arrays_and_floating_point_is_converted(tmp_path: Path) -> None:
    with runtime():
        params, optimizer = fresh(), optax.adam(0.1)
        state = optimizer.init(params)
        _, state = optimizer.update(params, state, params)
        ud.save(tmp_path / "run", params, state)
        types = jax.eval_shape(lambda: params)
        loaded = ud.load(tmp_path / "run", types, jax.eval_shape(optimizer.init, types))
        same((loaded.params, loaded.opt_state), (params, state))
        narrow = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        loaded = ud.load(tmp_path / "run", narrow, optimizer.init(narrow))
        same(loaded.params, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))
        assert loaded.opt_state[0].count == 1


@on_one_rank
def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with runtime():
        params, adam = fresh(), optax.adam(0.1)
        ud.save(tmp_path / "adam", params, adam.init(params))

        def refuses(text: str, *trees: Any, error: type[Exception] = CheckpointError, **options: Any) -> None:
            with pytest.raises(error, match=text):
                ud.load(tmp_path / "adam", *trees, **options)

        for text, other in (
            ("it lacks .*'extra'", {**params, "extra": jnp.ones(2)}),
            ("has what is not wanted .*'out'", {key: params[key] for key in ("dense", "scale")}),
            ("of another shape .*'out'", {**params, "out": jnp.ones(8)}),
            ("only floating-point types", {**params, "out": jnp.ones(7, jnp.int32)}),
        ):
            refuses(text, other)
        refuses("saved by ScaleByAdamState .*TraceState", params, optax.sgd(0.1, momentum=0.9).init(params))
        refuses("saved by ScaleByAdamState .*ScaleByLionState", params, optax.lion(0.1).init(params))
        averaged = optax.chain(adam, optax.ema(0.9))
        refuses("out#ema was not saved", params, averaged.init(params))
        refuses("acc_grads was not saved", params, optax.MultiSteps(adam, 2).init(params))
        refuses(
            "hyperparams/learning_rate is in only one", params, optax.inject_hyperparams(optax.adam)(0.1).init(params)
        )
        refuses("2 leaves|same path", {"a/b": params["out"], "a": {"b": params["out"]}}, error=UsageError)
        refuses("no tree with arrays", "params", error=UsageError)
        refuses("give the parameters, too", None, adam.init(params), error=UsageError)
        refuses("give the one that distribute", params, adam.init(params), optimizer=adam, error=UsageError)
        with pytest.raises(CheckpointError, match="no checkpoint"):
            ud.load(tmp_path / "nothing", params)

        ud.save(tmp_path / "averaged", params, averaged.init(params))
        with pytest.raises(CheckpointError, match="out#ema is not in this state"):
            ud.load(tmp_path / "averaged", params, adam.init(params))
        more = {**params, "extra": jnp.ones(2)}
        state = averaged.init(more)
        found = ud.load(tmp_path / "adam", more, state, strict=False)
        same(found.params, more)
        same(found.opt_state, state)
        with pytest.raises(CheckpointError, match="does not have extra of the parameters"):
            ud.load(tmp_path / "adam", jax.eval_shape(lambda: more), strict=False)

        shard = next((tmp_path / "adam").glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
        refuses(r"damaged|checksum", params, adam.init(params))


def test_an_error_of_one_rank_is_one_of_all(jax_pools: PartPools, tmp_path: Path) -> None:
    def on_rank(path: str) -> None:
        with runtime():
            params = fresh()
            if ud.rank():
                jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(params)
            with pytest.raises((CheckpointError, UsageError), match="was donated"):
                ud.save(path, params)
            ud.save(path, fresh())
            params = {**fresh(), "more": jnp.ones(2)} if ud.rank() else fresh()
            with pytest.raises(CheckpointError, match=r"'more'"):
                ud.load(path, params)

    jax_pools.get(2, engine="shm").run(on_rank, (str(tmp_path / "one"),))


def test_a_step_that_failed_goes_on_from_a_checkpoint_that_was_written_meanwhile(
    jax_pools: PartPools, tmp_path: Path
) -> None:
    def on_rank(path: str) -> None:
        with runtime():
            step = ud.TrainStep(loss_fn, fresh(), optax.adamw(0.02))
            step(batch(0))
            wanted = plain((step.params, step.opt_state))
            handle = ud.save(path, step, asynchronous=True, step=1)
            for number in range(5):  # each takes the memory of the arrays that are being saved
                step(batch(number))
            handle.wait()
            with pytest.raises(TypeError):
                step("nonsense")
            jax.tree.map(lambda leaf: leaf.delete(), step.params)
            ud.load(path, step)
            same(plain((step.params, step.opt_state)), wanted)
            step(batch(1))

    jax_pools.get(2, engine="shm").run(on_rank, (str(tmp_path / "series"),))
