"""Models of flax and equinox, and grain's loaders: as scripts of these libraries use them, against one process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import on_one_rank, runtime
from part_pools import PartOfPool

import unidist.jax as ud
from unidist.errors import UsageError

pytestmark = pytest.mark.parallel

needs_flax, needs_equinox, needs_grain = (
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}")
    for name in ("flax", "equinox", "grain")
)

STEPS = 3
STRATEGIES = ("data", "zero=1", "zero=3:bucket_mb=0.0002")


def _optimizer() -> optax.GradientTransformation:
    """Return one that adds: the gradient of a bias before a normalisation is noise, which Adam would blow up."""
    return optax.sgd(0.05, momentum=0.9)


def _batches() -> list[tuple[Any, Any]]:
    generator = np.random.default_rng(0)
    return [(generator.standard_normal((8, 6)), generator.standard_normal(8)) for _ in range(STEPS)]


def _own(batch: tuple[Any, ...], rank: int) -> tuple[Any, ...]:
    return tuple(part[rank * 4 : rank * 4 + 4] for part in batch)


def _close(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def _alone(loss: Callable[..., Any], params: Any, states: list[Any]) -> tuple[list[Any], Any, list[Any]]:
    """Train on all samples in one process, by optax alone: in halves, each with a state of its own.

    Args:
        loss: `loss(params, x, y, state)` returns the loss of a half, and its new state.
        params: at first.
        states: of the halves, at first.

    Returns:
        The losses, the parameters, and the states.
    """
    plain = _optimizer()
    optimizer_state = plain.init(params)
    losses = []

    @jax.jit
    def both(params: Any, batch: Any, states: list[Any]) -> tuple[Any, list[Any]]:
        halves = [loss(params, *_own(batch, rank), state) for rank, state in enumerate(states)]
        return sum(half[0] for half in halves) / 2, [half[1] for half in halves]

    for batch in _batches():
        (value, states), gradients = jax.value_and_grad(both, has_aux=True)(params, batch, states)
        updates, optimizer_state = plain.update(gradients, optimizer_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(value)
    return losses, params, states


def _double(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64) if leaf.dtype == jnp.float32 else leaf, tree)


def _linen() -> tuple[Any, Any]:
    """Return a model of flax.linen with running statistics, and its variables."""
    from flax import linen

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any, train: bool = True) -> Any:
            x = linen.Dense(5)(x)
            x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            return linen.Dense(1)(linen.relu(x))[:, 0]

    net = Net()
    return net, _double(net.init(jax.random.key(ud.rank()), jnp.ones((2, 6)), train=False))


@needs_flax
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_linen_with_running_statistics(two: PartOfPool, strategy: str) -> None:
    def on_rank() -> None:
        with runtime():
            net, variables = _linen()
            variables = ud.broadcast_parameters(variables)

            def loss(params: Any, x: Any, y: Any, stats: Any) -> Any:
                inputs = {"params": params, "batch_stats": stats}
                outputs, changed = net.apply(inputs, x, mutable=["batch_stats"])
                return jnp.mean((outputs - y) ** 2), changed["batch_stats"]

            step = ud.TrainStep(loss, variables["params"], _optimizer(), strategy, has_aux=True)
            stats, losses = variables["batch_stats"], []
            for batch in _batches():
                value, stats = step(*_own(batch, ud.rank()), stats=stats)
                losses.append(value)
            kept, params = stats, step.params
            value, changed = step.evaluate(*_own(_batches()[0], ud.rank()), stats=stats)
            assert jax.tree.structure(changed) == jax.tree.structure(kept)

            found = _alone(loss, variables["params"], [variables["batch_stats"]] * 2)
            _close((losses, params, kept), (found[0], found[1], found[2][ud.rank()]))

    two.run(on_rank)


def _nnx() -> Any:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            double = {"param_dtype": jnp.float64, "rngs": rngs}
            self.first = nnx.Linear(6, 5, **double)
            self.norm = nnx.BatchNorm(5, dtype=jnp.float64, **double)
            self.last = nnx.Linear(5, 1, **double)

        def __call__(self, x: Any) -> Any:
            return self.last(nnx.relu(self.norm(self.first(x))))[:, 0]

    return ud.broadcast_parameters(Net(nnx.Rngs(ud.rank())))


@needs_flax
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nnx_split_into_parameters_and_the_rest(two: PartOfPool, strategy: str) -> None:
    def on_rank() -> None:
        from flax import nnx

        with runtime():
            model = _nnx()
            graph, params, rest = nnx.split(model, nnx.Param, ...)

            def loss(params: Any, x: Any, y: Any, rest: Any) -> Any:
                model = nnx.merge(graph, params, rest, copy=True)
                value = jnp.mean((model(x) - y) ** 2)
                return value, nnx.split(model, nnx.Param, ...)[2]

            found = _alone(loss, params, [rest] * 2)
            step = ud.TrainStep(loss, params, _optimizer(), strategy, has_aux=True)
            losses = []
            for batch in _batches():
                value, rest = step(*_own(batch, ud.rank()), rest=rest)
                losses.append(value)
            params = step.params
            _close((losses, params, rest), (found[0], found[1], found[2][ud.rank()]))
            nnx.update(model, params, rest)
            assert model(_batches()[0][0]).shape == (8,)

    two.run(on_rank)


@needs_flax
@pytest.mark.parametrize("strategy", ["data", "zero=2"])
def test_nnx_optimizer_around_a_distributed_one(two: PartOfPool, strategy: str) -> None:
    def on_rank() -> None:
        from flax import nnx

        with runtime():
            model = _nnx()
            graph, params, rest = nnx.split(model, nnx.Param, ...)
            copies = jax.tree.map(jnp.array, (params, rest))

            def loss(params: Any, x: Any, y: Any, rest: Any) -> Any:
                model = nnx.merge(graph, params, rest, copy=True)
                value = jnp.mean((model(x) - y) ** 2)
                return value, nnx.split(model, nnx.Param, ...)[2]

            optimizer = nnx.Optimizer(model, ud.distribute(_optimizer(), strategy=strategy), wrt=nnx.Param)

            @nnx.jit
            def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
                value, gradients = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
                optimizer.update(model, gradients)
                return ud.allreduce(value)

            losses = [step(model, optimizer, *_own(batch, ud.rank())) for batch in _batches()]
            found = _alone(loss, copies[0], [copies[1]] * 2)
            _, params, rest = nnx.split(model, nnx.Param, ...)
            _close((losses, params, rest), (found[0], found[1], found[2][ud.rank()]))

    two.run(on_rank)


def _mlp(rank: int) -> Any:
    import equinox as eqx

    return eqx.nn.MLP(6, 1, 5, 2, key=jax.random.key(rank), dtype=jnp.float64)


def _mlp_loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def _mlp_alone() -> tuple[list[Any], Any]:
    import equinox as eqx

    params, static = eqx.partition(_mlp(0), eqx.is_inexact_array)
    losses, params, _ = _alone(lambda p, x, y, _: (_mlp_loss(eqx.combine(p, static), x, y), 0), params, [0, 0])
    return losses, params


@needs_equinox
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_equinox_module_with_functions_in_it(two: PartOfPool, strategy: str) -> None:
    def on_rank() -> None:
        import equinox as eqx

        with runtime():
            step = ud.TrainStep(_mlp_loss, _mlp(ud.rank()), _optimizer(), strategy)
            losses = [step(*_own(batch, ud.rank())) for batch in _batches()]
            model = step.params
            assert callable(model.activation)
            _close((losses, eqx.filter(model, eqx.is_inexact_array)), _mlp_alone())
            _close(step.evaluate(*_own(_batches()[0], ud.rank())), _mlp_loss(model, *_batches()[0]))

    two.run(on_rank)


@needs_equinox
@pytest.mark.parametrize("strategy", ["data", "zero=2"])
def test_an_equinox_loop(two: PartOfPool, strategy: str) -> None:
    def on_rank() -> None:
        import equinox as eqx

        with runtime():
            model, optimizer = ud.distribute(_mlp(ud.rank()), _optimizer(), strategy)
            state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

            @eqx.filter_jit
            def step(model: Any, state: Any, x: Any, y: Any) -> Any:
                value, gradients = eqx.filter_value_and_grad(_mlp_loss)(model, x, y)
                updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
                return eqx.apply_updates(model, updates), state, ud.allreduce(value)

            losses = []
            for batch in _batches():
                model, state, value = step(model, state, *_own(batch, ud.rank()))
                losses.append(value)
            _close((losses, eqx.filter(model, eqx.is_inexact_array)), _mlp_alone())

    two.run(on_rank)


def test_random_keys_by_name_differ_between_ranks(two: PartOfPool) -> None:
    def on_rank() -> float:
        with runtime():
            key = ud.seed(7)

            def loss(params: Any, x: Any, key: Any) -> Any:
                kept = jax.random.bernoulli(key, 0.5, x.shape)
                return jnp.mean(x * kept * params["w"]), jnp.mean(kept)

            step = ud.TrainStep(loss, {"w": jnp.ones(())}, optax.sgd(0.1), "zero=3", has_aux=True)
            key, used = jax.random.split(key)
            value, kept = step(jnp.ones(64), key=used)
            _close(value, ud.allreduce(kept))
            return float(kept)

    first, second = two.run(on_rank)
    assert first != second


def test_numpy_parameters_are_those_of_rank_0(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            own = {"w": np.full(3, 1.0 + ud.rank()), "name": "linear", "activation": jnp.tanh}
            step = ud.TrainStep(lambda p: jnp.sum(p["activation"](p["w"])), own, optax.sgd(0.0))
            assert step.params["name"] == "linear"
            _close(step.params["w"], np.ones(3))
            _close(ud.broadcast_parameters(own)["w"], np.ones(3))
            _close(ud.distribute(own, optax.sgd(0.1))[0]["w"], np.ones(3))

    two.run(on_rank)


@needs_equinox
@on_one_rank
def test_a_number_that_may_be_a_setting_must_be_told_apart() -> None:
    import equinox as eqx

    class Net(eqx.Module):
        linear: Any
        dropout: Any

        def __call__(self, x: Any, key: Any) -> Any:
            return self.linear(self.dropout(x, key=key))[0]

    net = Net(eqx.nn.Linear(6, 1, key=jax.random.key(0)), eqx.nn.Dropout(0.5))

    def loss(net: Any, x: Any, key: Any) -> Any:
        return jnp.mean(jax.vmap(net, in_axes=(0, None))(x, key))

    with runtime():
        with pytest.raises(UsageError, match=r"'dropout/p' is the Python number 0.5.*eqx.partition"):
            ud.TrainStep(loss, net, optax.sgd(0.1))
        params, static = eqx.partition(net, eqx.is_inexact_array)
        step = ud.TrainStep(lambda p, x, key: loss(eqx.combine(p, static), x, key), params, optax.sgd(0.1))
        assert jnp.isfinite(step(jnp.ones((4, 6)), key=jax.random.key(1)))


@needs_flax
@on_one_rank
def test_nnx_models_are_to_be_split() -> None:
    from flax import nnx

    with runtime(), pytest.raises(UsageError, match=r"of uint32: .*nnx.split\(model, nnx.Param, ...\)"):
        ud.TrainStep(lambda model: 0.0, nnx.Dropout(0.5, rngs=nnx.Rngs(0)), optax.sgd(0.1))


@needs_grain
def test_grain_reads_each_sample_on_one_rank(two: PartOfPool) -> None:
    def on_rank() -> tuple[list[int], list[int]]:
        import grain

        with runtime():
            source = ud.shard(list(range(12)))
            dataset = grain.MapDataset.source(source).shuffle(seed=1).batch(3)
            mapped = [int(sample) for batch in dataset for sample in batch]
            sampler = grain.samplers.IndexSampler(
                num_records=len(source), shard_options=grain.sharding.NoSharding(), num_epochs=1, shuffle=False
            )
            loaded = [int(sample) for sample in grain.DataLoader(data_source=source, sampler=sampler, worker_count=0)]
            return mapped, loaded

    (first_mapped, first_loaded), (second_mapped, second_loaded) = two.run(on_rank)
    assert sorted(first_mapped + second_mapped) == list(range(12))
    assert first_loaded + second_loaded == [*range(0, 12, 2), *range(1, 12, 2)]


@needs_grain
def test_grain_goes_on_where_it_was(two: PartOfPool) -> None:
    """By the state of its own iterator, in a process that was started again."""

    def on_rank() -> tuple[list[list[int]], list[list[int]]]:
        import grain

        def batches() -> Any:
            source = ud.shard(list(range(24)))
            return iter(grain.MapDataset.source(source).seed(3).shuffle().batch(2).repeat(2).to_iter_dataset())

        def taken(iterator: Any, count: int) -> list[list[int]]:
            return [np.asarray(next(iterator)).tolist() for _ in range(count)]

        with runtime():
            undisturbed = batches()
            taken(undisturbed, 4)
            state = undisturbed.get_state()
            wanted = taken(undisturbed, 8)
        with runtime():
            resumed = batches()
            resumed.set_state(state)
            return taken(resumed, 8), wanted

    for found, wanted in two.run(on_rank):
        assert found == wanted
