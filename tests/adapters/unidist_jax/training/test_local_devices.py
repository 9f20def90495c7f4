"""Training on several devices of each process: the numbers of one process with one device, by one exchange a step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from _programs import recorded, runtime
from _reference import STRATEGIES, batches, check, loss_of, optimizer, parameters
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from part_pools import PartOfPool

import unidist.jax as ud
from unidist.errors import ConfigurationError

pytestmark = pytest.mark.parallel


def _placed(tree: Any, *dims: str) -> Any:
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    assert mesh.size == 2
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*dims)))


def _by_step(rank: int, strategy: str, *, placed: bool) -> tuple[Any, list[Any]]:
    step = ud.TrainStep(loss_of, _placed(parameters(rank)), optimizer(), strategy)
    own = [_placed(batch, "rows") if placed else batch for batch in batches(rank, 2)]
    losses = [step(*batch) for batch in own]
    np.testing.assert_allclose(step.evaluate(*own[0]), loss_of(step.params, *batches(0, 1)[0]), rtol=1e-12)
    return step.params, losses


def _by_loop(rank: int, strategy: str) -> tuple[Any, list[Any]]:
    params, bound = ud.distribute(_placed(parameters(rank)), optimizer(), strategy)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = bound.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, ud.allreduce(loss, name="loss")

    state, losses = bound.init(params), []
    for batch in batches(rank, 2):
        params, state, loss = step(params, state, *_placed(batch, "rows"))
        losses.append(loss)
    return params, losses


_WAYS = ("step", "loop", "arrays of numpy")


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        pytest.param(strategy, how, marks=[] if place == index else [pytest.mark.soak])
        for place, strategy in enumerate(STRATEGIES)
        for index, how in enumerate(_WAYS)
    ],
)
def test_training_gives_the_numbers_of_one_device(two_with_devices: PartOfPool, strategy: str, how: str) -> None:
    def on_rank() -> None:
        with runtime():
            if how == "loop":
                params, losses = _by_loop(ud.rank(), strategy)
            else:
                params, losses = _by_step(ud.rank(), strategy, placed=how == "step")
            assert [len(leaf.addressable_shards) for leaf in params.values()] == [2, 2, 2]
            check(strategy, params, losses)

    two_with_devices.run(on_rank)


def test_each_device_computes_on_its_rows_and_each_process_exchanges_once(two_with_devices: PartOfPool) -> None:
    def on_rank() -> tuple[list[str], int]:
        from unidist_arrays.fused_exchange import FusedExchange

        with runtime(), recorded() as calls:
            exchanges: list[object] = []
            run = FusedExchange.run
            monkeypatch = pytest.MonkeyPatch()
            monkeypatch.setattr(FusedExchange, "run", lambda self, own: exchanges.append(own) or run(self, own))
            rows: list[int] = []

            def loss(params: Any, x: Any, y: Any) -> Any:
                jax.debug.inspect_array_sharding(x, callback=lambda found: rows.append(found.shard_shape(x.shape)[0]))
                return loss_of(params, x, y)

            step = ud.TrainStep(loss, _placed(parameters(0)), optax.sgd(0.1))
            own = batches(ud.rank(), 2)
            step(*own[0])
            assert rows
            assert rows == [3] * len(rows)
            calls.clear()
            exchanges.clear()
            step(*own[1])
            monkeypatch.undo()
            found = list(calls), len(exchanges)
            step(*(array[:5] for array in own[2]))  # rows that do not divide are on each device
            assert rows[-1] == 5
            return found

    for calls, exchanges in two_with_devices.run(on_rank):
        assert exchanges == 1
        assert len(calls) == 6  # of each device: gradients early, the exchange, the loss
        assert calls[::2] == calls[1::2]


def test_strategies_that_divide_the_parameters_refuse_several_devices(two_with_devices: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime(), pytest.raises(ConfigurationError, match="they are on 2 devices of this process"):
            ud.TrainStep(loss_of, _placed(parameters(0)), optax.sgd(0.1), "zero=3")

    two_with_devices.run(on_rank)
