"""`fit` of a distributed Keras model on JAX: first weights, data, callbacks, layers with state, files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from _keras_training import BATCH, CLASSES, FEATURES, alone, by_fit, loss, network, runtime, samples, share_of, values
from part_pools import PartOfPool

import unidist.jax as ud_jax
import unidist.keras as ud
from unidist.errors import UsageError

pytestmark = pytest.mark.parallel


def equal_on_all_ranks(found: Any) -> bool:
    everyone = ud_jax.allgather_object(found)
    return all(each == everyone[0] for each in everyone)


def as_bytes(model: Any) -> list[bytes]:
    return [value.tobytes() for value in values(model)]


@pytest.mark.parametrize("built", [True, False])
def test_all_ranks_begin_with_the_weights_of_rank_0(two: PartOfPool, built: bool) -> None:
    def on_rank() -> None:
        with runtime():
            model, optimizer = ud.distribute(network(built=built), keras.optimizers.SGD(0.0))
            if built:
                assert (as_bytes(model) == as_bytes(network())) == (ud.rank() == 0)
                assert equal_on_all_ranks(as_bytes(model))
            by_fit(model, optimizer)
            assert equal_on_all_ranks(as_bytes(model))

    two.run(on_rank)


@pytest.mark.parametrize("built", [True, False])
def test_the_callback_gives_all_ranks_one_ranks_weights(two: PartOfPool, built: bool) -> None:
    def on_rank() -> None:
        with runtime():
            model = network(built=built)
            optimizer = ud.DistributedOptimizer(keras.optimizers.Adam(0.01))
            model.compile(optimizer, loss())
            callback = ud.callbacks.BroadcastGlobalVariablesCallback(1)
            model.fit(*share_of(samples()), batch_size=6, verbose=0, callbacks=[callback])
            assert equal_on_all_ranks(as_bytes(model))
            with pytest.raises(ValueError, match="must be variables"):
                ud.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3])

    two.run(on_rank)


def test_state_that_only_rank_0_has_loaded_reaches_all(two: PartOfPool) -> None:
    def refused() -> None:
        with runtime():
            model, optimizer = network(), keras.optimizers.Adam(0.01)
            if ud.rank() == 0:
                optimizer.build(model.trainable_variables)
            with pytest.raises(UsageError, match="has state already, and zero shards it as it is made"):
                ud.distribute(model, optimizer, "zero=1")

    two.run(_loaded_on_rank_0)
    two.run(refused)


def _loaded_on_rank_0() -> None:
    with runtime():
        model, optimizer = network(), keras.optimizers.Adam(0.01)
        if ud.rank() == 0:
            model.compile(optimizer, loss())
            model.fit(*samples(), batch_size=BATCH, verbose=0)
        model, optimizer = ud.distribute(model, optimizer)
        assert int(optimizer.iterations.value) == 4
        assert equal_on_all_ranks([np.asarray(each.value).tobytes() for each in optimizer.variables])
        assert equal_on_all_ranks(as_bytes(model))


def test_metrics_are_averaged_and_evaluate_says_each_ranks_own(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            model, optimizer = ud.distribute(network(), keras.optimizers.SGD(0.1))
            model.compile(optimizer, loss(), metrics=["accuracy"])
            x, y = share_of(samples())
            own = model.evaluate(x, y, verbose=0, return_dict=True)
            seen: dict[str, float] = {}
            note = keras.callbacks.LambdaCallback(on_test_end=lambda logs: seen.update(logs))
            average = ud.callbacks.MetricAverageCallback()
            model.evaluate(x, y, verbose=0, callbacks=[average, note])
            for name, value in own.items():
                np.testing.assert_allclose(seen[name], np.mean(ud_jax.allgather_object(value)), rtol=1e-12)
            history = model.fit(x, y, validation_data=(x, y), epochs=2, verbose=0, callbacks=[average]).history
            assert equal_on_all_ranks(history)

    two.run(on_rank)


def test_learning_rates_are_scheduled_batch_by_batch(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            model, optimizer = ud.distribute(network(), keras.optimizers.SGD(0.4, momentum=0.9))
            model.compile(optimizer, loss())
            rates: list[float] = []
            warmup = ud.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)

            class Note(keras.callbacks.Callback):
                def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                    rates.append(float(self.model.optimizer.learning_rate.value))

            note = Note()
            x, y = share_of(samples())
            history = model.fit(x, y, batch_size=6, epochs=3, verbose=0, callbacks=[warmup, note]).history
            wanted = [0.2 * (1 + (batch + 1) / 8) for batch in range(8)] + [0.4] * 4
            np.testing.assert_allclose(rates, wanted, rtol=1e-12)
            np.testing.assert_allclose(history["lr"], [0.3, 0.4, 0.4], rtol=1e-12)
            assert equal_on_all_ranks(as_bytes(model))
            schedule = ud.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.5**epoch, start_epoch=1)
            history = model.fit(x, y, batch_size=6, epochs=3, verbose=0, callbacks=[schedule]).history
            np.testing.assert_allclose(history["lr"], [0.4, 0.2, 0.1], rtol=1e-12)

    two.run(on_rank)


def test_shards_are_trained_on_in_their_own_order(two: PartOfPool) -> None:
    def on_rank() -> list[list[int]]:
        with runtime():
            x, y = np.arange(22.0)[:, None], np.zeros(22)
            batches = ud.shard((x, y), batch_size=4)
            seen: list[list[int]] = [[]]
            model = keras.Sequential([keras.layers.Dense(1)])
            model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.0))
            model.compile(optimizer, "mse", run_eagerly=True)
            plain = model.train_step

            def train_step(state: Any, data: Any) -> Any:
                seen[-1].extend(np.asarray(data[0])[:, 0].astype(int).tolist())
                return plain(state, data)

            model.train_step = train_step
            next_epoch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append([]))
            model.fit(batches, epochs=2, verbose=0, callbacks=[next_epoch])
            again = [np.asarray(batch[0])[:, 0].astype(int).tolist() for batch in ud.shard((x, y), batch_size=4)]
            assert [sample for batch in again for sample in batch] == seen[0]  # nothing was left out to build the model
            assert [len(batch) for batch in again] == [4, 4, 3]
            return seen[:2]

    first, second = two.run(on_rank)
    for own, other in zip(first, second, strict=True):
        assert sorted(own + other) == list(range(22))
    assert first[0] != first[1]


def test_batch_normalisation_over_all_ranks_is_that_of_one_process(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            model = network(norm=ud.SyncBatchNormalization)
            model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1))
            weights = values(model)
            by_fit(model, optimizer)
            wanted = alone(weights, keras.optimizers.SGD(0.1), norm=keras.layers.BatchNormalization)
            for one, other in zip(values(model), wanted, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-6)  # Keras' layer computes in float32

    two.run(on_rank)


def test_the_statistics_of_plain_batch_normalisation_are_the_mean_of_the_ranks(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            model, optimizer = ud.distribute(network(norm=keras.layers.BatchNormalization), keras.optimizers.Adam(0.01))
            by_fit(model, optimizer)
            assert equal_on_all_ranks([np.asarray(each.value).tobytes() for each in model.trainable_variables])
            assert equal_on_all_ranks([np.asarray(each.value).tobytes() for each in model.non_trainable_variables])

    two.run(on_rank)


@pytest.mark.parametrize("strategy", ["data", "zero=1"])
def test_float64_of_keras_is_float32_where_jax_computes_in_32_bits(two: PartOfPool, strategy: str) -> None:
    def on_rank() -> None:
        jax.config.update("jax_enable_x64", False)
        try:
            with runtime("float64"):
                model, optimizer = ud.distribute(network(), keras.optimizers.Adam(0.01), strategy)
                assert model.trainable_variables[0].value.dtype == np.float32
                weights = values(model)
                by_fit(model, optimizer)
                for one, other in zip(values(model), alone(weights, keras.optimizers.Adam(0.01)), strict=True):
                    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        finally:
            jax.config.update("jax_enable_x64", True)

    two.run(on_rank)


@pytest.mark.parametrize("strategy", ["data", "zero=1"])
def test_all_ranks_skip_a_step_in_which_one_overflows(two: PartOfPool, strategy: str) -> None:
    def on_rank() -> None:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_float16")
        try:
            with runtime("float32"):
                model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
                model, optimizer = ud.distribute(model, keras.optimizers.SGD(0.1), strategy)
                assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
                model.compile(optimizer, "mse")
                first = as_bytes(model)
                x = np.full((8, FEATURES), np.inf if ud.rank() == 1 else 0.1, np.float32)
                y = np.zeros((8, CLASSES), np.float32)
                model.fit(x, y, batch_size=8, verbose=0)
                assert as_bytes(model) == first
                assert float(optimizer.dynamic_scale.value) == 2.0**14
                model.fit(np.full_like(x, 0.1 + 0.1 * ud.rank()), y, batch_size=8, verbose=0)
                assert as_bytes(model) != first
                assert equal_on_all_ranks(as_bytes(model))
        finally:
            keras.config.set_dtype_policy(before)

    two.run(on_rank)


def test_saved_models_load_with_plain_and_with_distributed_optimizers(two: PartOfPool, tmp_path: Path) -> None:
    def on_rank() -> None:
        with runtime():
            model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(CLASSES)])
            model, optimizer = ud.distribute(model, keras.optimizers.Adam(0.01))
            model.compile(optimizer, loss())
            path = str(tmp_path / f"model{ud.rank()}.keras")
            best = ud.callbacks.BestModelCheckpoint(monitor="loss", filepath=path)
            model.fit(*share_of(samples()), batch_size=6, verbose=0, callbacks=[best])
            plain = keras.models.load_model(path)
            assert type(plain.optimizer) is keras.optimizers.Adam
            assert int(plain.optimizer.iterations.value) == 4
            assert as_bytes(plain) == as_bytes(model)
            loaded = ud.load_model(path)
            for each in (model, loaded):
                each.fit(*share_of(samples()), batch_size=6, shuffle=False, verbose=0)
            assert as_bytes(loaded) == as_bytes(model)
            with pytest.raises(ValueError, match="has no path"):
                model.fit(*share_of(samples()), verbose=0, callbacks=[ud.callbacks.BestModelCheckpoint()])

    two.run(on_rank)


def test_a_file_of_sharded_state_is_warned_of(two: PartOfPool, tmp_path: Path) -> None:
    def on_rank() -> None:
        with runtime():
            model, optimizer = ud.distribute(network(), keras.optimizers.Adam(0.01), "zero=1")
            by_fit(model, optimizer)
            with pytest.warns(UserWarning, match="sharded over the ranks and is not in this file"):
                model.save(str(tmp_path / f"sharded{ud.rank()}.keras"))

    two.run(on_rank)


@pytest.mark.parametrize("strategy", ["accumulate=3", "zero=1,accumulate=3"])
def test_a_short_window_is_applied_by_flush(two: PartOfPool, strategy: str) -> None:
    def on_rank() -> None:
        with runtime():
            model, optimizer = ud.distribute(network(), keras.optimizers.SGD(0.1), strategy)
            weights = values(model)
            model.compile(optimizer, loss())
            x, y = share_of(samples(2), 2)
            model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
            assert all((one == other).all() for one, other in zip(values(model), weights, strict=True))
            assert optimizer.flush()
            assert not optimizer.flush()
            assert int(optimizer.iterations.value) == 1
            reference = network()
            reference.set_weights(weights)
            reference.compile(keras.optimizers.SGD(0.1), loss())
            reference.fit(*samples(2), batch_size=2 * BATCH, shuffle=False, verbose=0)
            for one, other in zip(values(model), values(reference), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-14)

    two.run(on_rank)


@pytest.mark.parametrize("strategy", ["data", "zero=1,accumulate=2"])
def test_a_train_step_does_what_one_process_does(two: PartOfPool, strategy: str) -> None:
    passes = 2 if "accumulate" in strategy else 1

    def on_rank() -> None:
        with runtime():
            step = ud.TrainStep(network(), keras.optimizers.Adam(0.01), loss(), strategy)
            weights = values(step.model)
            x, y = share_of(samples())
            losses = [step(x[i : i + 6], y[i : i + 6]).item() for _ in range(2) for i in range(0, len(x), 6)]
            assert equal_on_all_ranks(losses)
            wanted = alone(weights, keras.optimizers.Adam(0.01), batch=passes * BATCH)
            for one, other in zip(values(step.model), wanted, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-12)
            # Compiled, as the step is: Keras rounds some of it to float32.
            whole = float(jax.jit(lambda x, y: loss()(y, step.model(x)))(*samples()))
            np.testing.assert_allclose(step.evaluate(x, y).item(), whole, rtol=1e-12)
            assert step.predict(x).shape == (len(x), CLASSES)

    two.run(on_rank)


def test_layers_that_are_each_ranks_own_are_left_out(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            model = network()
            model.set_weights([np.full_like(each, 0.1) for each in values(model)])
            optimizer = ud.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.layers[-1])
            by_fit(model, optimizer)
            shared, own = model.layers[0].get_weights(), model.layers[-1].get_weights()
            assert equal_on_all_ranks([each.tobytes() for each in shared])
            assert not equal_on_all_ranks([each.tobytes() for each in own])
            with pytest.raises(UsageError, match="on JAX only exchanged gradients are summed up"):
                ud.PartialDistributedOptimizer(
                    keras.optimizers.SGD(0.1), local_layers=model.layers[-1], backward_passes_per_step=2
                )

    two.run(on_rank)


def test_operations_take_and_return_arrays(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            own = keras.Variable([1.0 + ud.rank()])
            assert ud.allreduce(own).tolist() == [1.5]
            assert ud.allreduce([1.0], op=ud.Sum).tolist() == [2.0]
            assert ud.allgather(own).tolist() == [1.0, 2.0]
            assert ud.broadcast(own, 1).tolist() == [2.0]
            assert ud.reducescatter(keras.ops.ones((2, 1)), op=ud.Sum).tolist() == [[2.0]]
            assert ud.device() == "cpu:0"

    two.run(on_rank)


def test_whole_data_on_every_rank_is_a_warning(two: PartOfPool) -> None:
    def on_rank() -> tuple[list[str], list[str]]:
        found: list[str] = []

        class Keep(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                found.append(record.getMessage())

        keep = Keep()
        logging.getLogger("unidist.training").addHandler(keep)
        try:
            with runtime():
                model, optimizer = ud.distribute(network(), keras.optimizers.SGD(0.1))
                model.compile(optimizer, loss())
                for _ in range(2):
                    model.fit(*samples(), verbose=0)
                whole = list(found)
                model, optimizer = ud.distribute(network(), keras.optimizers.SGD(0.1))
                model.compile(optimizer, loss())
                model.fit(*share_of(samples()), verbose=0)
                return whole, found[len(whole) :]
        finally:
            logging.getLogger("unidist.training").removeHandler(keep)

    first, second = two.run(on_rank)
    assert len(first[0]) == 1
    assert "ud.shard((x, y)" in first[0][0]
    assert first[1] == second[0] == second[1] == []


@pytest.mark.parametrize(
    ("arguments", "rate", "passes"),
    [
        ({"groups": 2, "gradient_predivide_factor": 2.0}, 0.1, 1),
        ({"op": ud.Sum}, 0.05, 1),
        ({"backward_passes_per_step": 2, "average_aggregated_gradients": True}, 0.1, 2),
        ({"backward_passes_per_step": 2}, 0.05, 2),
    ],
)
def test_the_arguments_of_horovods_optimizer(
    two: PartOfPool, arguments: dict[str, Any], rate: float, passes: int
) -> None:
    def on_rank() -> None:
        with runtime():
            model = network()
            weights = [
                np.full_like(each, 0.1) + 0.01 * np.arange(each.size).reshape(each.shape) for each in values(model)
            ]
            model.set_weights(weights)
            by_fit(model, ud.DistributedOptimizer(keras.optimizers.SGD(rate), **arguments))
            wanted = alone(weights, keras.optimizers.SGD(0.1), batch=passes * BATCH)
            for one, other in zip(values(model), wanted, strict=True):
                np.testing.assert_allclose(one, other, atol=1e-12)

    two.run(on_rank)


def test_groups_of_variables_and_process_sets(two: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            model = network()
            model.set_weights([np.full_like(each, 0.1) for each in values(model)])
            groups = [model.layers[0].trainable_variables, [model.layers[-1].kernel, keras.Variable(1.0)]]
            by_fit(model, ud.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=groups))
            assert equal_on_all_ranks(as_bytes(model))
            own = [ud.add_process_set([rank]) for rank in range(2)]
            by_fit(model, ud.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=own[ud.rank()]))
            assert not equal_on_all_ranks(as_bytes(model))

    two.run(on_rank)
