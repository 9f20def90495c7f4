"""Horovod's callbacks on Keras 3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from _keras_training import CLASSES, FEATURES, network, runtime, values

import unidist.keras as hvd
import unidist.tensorflow as ud
from unidist.jobs.pool.pool import RankPool

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def own_data(rows: int = 32) -> tuple[Any, Any]:
    generator = np.random.default_rng(100 + ud.rank())
    return generator.normal(size=(rows, FEATURES)), generator.integers(CLASSES, size=rows)


def compiled(model: Any, optimizer: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    return model


def equal_on_all_ranks(found: Any) -> bool:
    return all(each == ud.allgather_object(found)[0] for each in ud.allgather_object(found))


def test_broadcasts_before_the_first_batch_or_after_it(pool: Pool) -> None:
    def on_rank() -> None:
        for built in (True, False):
            with runtime("float32"):
                keras.utils.set_random_seed(ud.rank())
                layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(CLASSES)]
                model = keras.Sequential([keras.Input((FEATURES,)), *layers] if built else layers)
                optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
                callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
                compiled(model, optimizer).fit(*own_data(), batch_size=8, verbose=0, callbacks=[callback])
                assert equal_on_all_ranks([value.tobytes() for value in values(model)])
                kept = keras.Variable(float(ud.rank()))
                callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=kept)
                model.extra = kept
                model.fit(*own_data(), batch_size=8, verbose=0, callbacks=[callback])
                assert float(kept.numpy()) == ud.rank()
                with pytest.raises(ValueError, match="must be variables"):
                    hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3])

    pool(2, "shm").run(on_rank)


def test_averages_metrics(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime("float32"):
            model, optimizer = hvd.distribute(network(), keras.optimizers.SGD(0.1))
            compiled(model, optimizer)
            x, y = own_data()
            own = model.evaluate(x, y, verbose=0, return_dict=True)
            seen: dict[str, float] = {}
            note = keras.callbacks.LambdaCallback(on_test_end=lambda logs: seen.update(logs))
            model.evaluate(x, y, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback(), note])
            for name, value in own.items():
                np.testing.assert_allclose(seen[name], np.mean(ud.allgather_object(value)), rtol=1e-6)
            assert len(set(ud.allgather_object(own["loss"]))) == 2
            average = [hvd.callbacks.MetricAverageCallback()]
            history = model.fit(x, y, validation_data=(x, y), epochs=2, verbose=0, callbacks=average).history
            assert equal_on_all_ranks(history["loss"])
            assert equal_on_all_ranks(history["val_accuracy"])

    pool(2, "shm").run(on_rank)


def test_learning_rate_warms_up(pool: Pool, capfd: pytest.CaptureFixture[str]) -> None:
    def on_rank() -> list[float]:
        with runtime("float32"):
            model, optimizer = hvd.distribute(network(), keras.optimizers.SGD(0.4, momentum=0.5))
            rates: list[float] = []
            note = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: rates.append(float(optimizer.learning_rate))
            )
            warmup = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
            x, y = own_data(16)
            history = compiled(model, optimizer).fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[warmup, note])
            np.testing.assert_allclose(history.history["lr"], [0.3, 0.4, 0.4], rtol=1e-6)
            return rates

    for rates in pool(2, "shm").run(on_rank):
        np.testing.assert_allclose(rates, [0.25, 0.3, 0.35, 0.4, 0.4, 0.4], rtol=1e-6)


def test_learning_rate_schedule_corrects_momentum(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime("float64"):
            x, y = own_data(8)
            found = {}
            for corrected in (True, False):
                model = compiled(network(), keras.optimizers.SGD(0.4, momentum=0.5))
                schedule = hvd.callbacks.LearningRateScheduleCallback(0.4, 0.5, momentum_correction=corrected)
                before: list[Any] = []
                after: list[Any] = []
                notes = [
                    keras.callbacks.LambdaCallback(
                        on_train_batch_begin=lambda batch, logs: None,
                        on_epoch_begin=lambda epoch, logs, model=model, before=before: before.append(
                            [v.numpy() for v in model.optimizer.variables[2:]]
                        ),
                    ),
                    schedule,
                    keras.callbacks.LambdaCallback(
                        on_train_batch_begin=lambda batch, logs, model=model, after=after: after.append(
                            [v.numpy() for v in model.optimizer.variables[2:]]
                        )
                    ),
                ]
                history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=notes)
                np.testing.assert_allclose(history.history["lr"], [0.4, 0.2], rtol=1e-6)
                found[corrected] = [
                    float(np.abs(b).sum() / np.abs(a).sum()) for a, b in zip(before[1], after[1], strict=True)
                ]
            np.testing.assert_allclose(found[True], 0.5, rtol=1e-6)
            np.testing.assert_allclose(found[False], 1.0)
            with pytest.raises(ValueError, match="initial_lr"):
                hvd.callbacks.LearningRateScheduleCallback(None, 0.5)

    pool(1, "single").run(on_rank)


def test_keeps_the_best_model_and_loads_it(pool: Pool, tmp_path: Path) -> None:
    def on_rank() -> None:
        with runtime("float32"):
            model, optimizer = hvd.distribute(network(), keras.optimizers.Adam(0.01))
            checkpoint = hvd.callbacks.BestModelCheckpoint(monitor="loss")
            x, y = own_data()
            compiled(model, optimizer)
            with pytest.raises(ValueError, match="has no path"):
                model.fit(x, y, verbose=0, callbacks=[checkpoint])
            checkpoint.filepath = str(tmp_path / f"{ud.rank()}.keras")
            model.fit(x, y, epochs=2, verbose=0, callbacks=[checkpoint])
            loaded = hvd.load_model(checkpoint.filepath)
            assert isinstance(loaded.optimizer, keras.optimizers.Adam)
            assert int(loaded.optimizer.iterations.numpy()) == int(optimizer.iterations.numpy())
            assert hasattr(loaded.optimizer, "flush")  # distributed
            loaded.fit(x, y, batch_size=8, verbose=0)
            assert equal_on_all_ranks([value.tobytes() for value in values(loaded)])

    pool(2, "shm").run(on_rank)


def test_elastic_callbacks_keep_the_state(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime("float32"):
            model = compiled(network(seed=ud.rank()), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
            model.optimizer.build(model.trainable_variables)
            state = hvd.elastic.KerasState(model, batch=0, epoch=0)
            callbacks = [
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            ]
            seen: list[int] = []
            note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(state.batch))

            @hvd.elastic.run
            def train(state: Any) -> None:
                model.fit(*own_data(), batch_size=8, epochs=2, verbose=0, callbacks=[*callbacks, note])

            train(state)
            assert (state.epoch, state.batch) == (2, 0)
            assert seen == [0, 1, 2, 3] * 2
            trained = values(model)
            model.set_weights([value * 0 for value in values(model)])
            state.restore()
            assert all((a == b).all() for a, b in zip(values(model), trained, strict=True))

    pool(2, "shm").run(on_rank)


def test_functions_of_values(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime("float32"):
            rank = hvd.rank()
            assert hvd.allreduce([rank * 2.0]).numpy().tolist() == [1.0]
            assert hvd.allgather([rank]).numpy().tolist() == [0, 1]
            assert hvd.broadcast([rank + 5], 1).numpy().tolist() == [6]
            assert hvd.reducescatter([1.0, 3.0], op=hvd.Sum).numpy().tolist() == [[2.0], [6.0]][rank]
            with pytest.raises(RuntimeError, match="eager"):
                hvd.broadcast_global_variables(0)
            with pytest.raises(ValueError, match="legacy"):
                hvd.load_model("nowhere.keras", legacy_opts=True)

    pool(2, "shm").run(on_rank)
