"""What a script can call in `horovod.tensorflow.keras`, with tf_keras, as Horovod knows no other Keras."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf
from beside import Table, attempt

TABLE = Table()
case, differs = TABLE.case, TABLE.differs


def values(hvd: Any, *shape: int) -> Any:
    """Return small numbers, others on every rank."""
    return np.float32(np.arange(int(np.prod(shape))) % 5 + hvd.rank()).reshape(shape)


@case("array", "list", "tensor", "number")
def operations(hvd: Any, kind: str) -> Any:
    made = values(hvd, 4)
    given = {"array": made, "list": made.tolist(), "tensor": tf.constant(made), "number": 2.0 + hvd.rank()}[kind]
    found = [hvd.allreduce(given, name="a"), hvd.broadcast(given, 1), hvd.broadcast(given, root_rank=0, name="b")]
    if kind != "number":
        found += [
            hvd.allgather(given),
            hvd.allgather(given, name="c"),
            hvd.reducescatter(given),
            hvd.reducescatter(given, op=hvd.Sum),
        ]
    return [found, [tf.is_tensor(each) for each in found]]


@case()
def allreduce_with_arguments(hvd: Any) -> Any:
    made = values(hvd, 3)
    return [
        hvd.allreduce(made, average=False),
        hvd.allreduce(made, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        hvd.allreduce(made, compression=hvd.Compression.fp16),
        attempt(lambda: hvd.allreduce(made, average=True, op=hvd.Sum)),
    ]


@case("allreduce", "allgather", "broadcast")
def operations_on_none(hvd: Any, name: str) -> Any:
    return getattr(hvd, name)(None, *[0] * (name == "broadcast"))


@case(2, -1)
def broadcast_from_a_root_that_is_none(hvd: Any, root: int) -> Any:
    return hvd.broadcast(values(hvd, 3), root)


@case()
def broadcast_global_variables_in_eager_mode(hvd: Any) -> Any:
    return hvd.broadcast_global_variables(0)


def kinds() -> dict[str, Any]:
    optimizers = tf.keras.optimizers
    return {
        "sgd": lambda: optimizers.SGD(0.1, momentum=0.9),
        "adam": lambda: optimizers.Adam(0.01),
        "old sgd": lambda: optimizers.legacy.SGD(0.1, momentum=0.9),
        "old adam": lambda: optimizers.legacy.Adam(0.01),
    }


KINDS = ("sgd", "adam", "old sgd", "old adam")
ARGUMENTS = {
    "none": lambda hvd: {},
    "sum": lambda hvd: {"op": hvd.Sum},
    "fp16": lambda hvd: {"compression": hvd.Compression.fp16},
    "predivide": lambda hvd: {"gradient_predivide_factor": 2.0},
    "groups": lambda hvd: {"groups": 1},
    "num_groups": lambda hvd: {"num_groups": 1},
    "sparse_as_dense": lambda hvd: {"sparse_as_dense": True},
    "process set": lambda hvd: {"process_set": hvd.global_process_set},
}


def model_of() -> Any:
    tf.keras.utils.set_random_seed(1)
    layers = tf.keras.layers
    return tf.keras.Sequential([layers.Dense(4, activation="tanh", input_shape=(3,)), layers.Dense(1)])


def data_of(hvd: Any) -> Any:
    generator = np.random.default_rng(hvd.rank())
    return generator.standard_normal((16, 3)).astype("float32"), generator.standard_normal((16, 1)).astype("float32")


def fitted(hvd: Any, optimizer: Any, **arguments: Any) -> Any:
    model = model_of()
    model.compile(optimizer=optimizer, loss="mse", **arguments)
    history = model.fit(*data_of(hvd), batch_size=4, epochs=2, verbose=0, shuffle=False)
    return [history.history["loss"], model.get_weights()]


@case(*((kind, run_eagerly) for kind in KINDS for run_eagerly in (False, True)))
def fit(hvd: Any, kind: str, run_eagerly: bool) -> Any:
    return fitted(hvd, hvd.DistributedOptimizer(kinds()[kind]()), run_eagerly=run_eagerly)


@case(*((kind, name) for kind in ("sgd", "old sgd") for name in ARGUMENTS))
def fit_with(hvd: Any, kind: str, name: str) -> Any:
    return fitted(hvd, hvd.DistributedOptimizer(kinds()[kind](), **ARGUMENTS[name](hvd)))


@case(*((kind, sums) for kind in ("sgd", "old sgd") for sums in (False, True)))
def computed_and_applied(hvd: Any, kind: str, sums: bool) -> Any:
    """Return what a script's own loop gets that computes gradients by the optimizer and applies them."""
    optimizer = hvd.DistributedOptimizer(kinds()[kind](), op=hvd.Sum if sums else hvd.Average)
    weight = tf.Variable([1.0, 2.0])
    found = []
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight) * (hvd.rank() + 1.0)
        pairs = optimizer._compute_gradients(loss, [weight], tape=tape)
        found.append([gradient for gradient, _ in pairs])
        optimizer.apply_gradients(pairs)
    return [found, weight.numpy()]


@case(*((kind, average, in_graph) for kind in KINDS for average in (False, True) for in_graph in (False, True)))
def several_passes_for_one_update(hvd: Any, kind: str, average: bool, in_graph: bool) -> Any:
    """Return weights, and what the optimizer counts: `iterations` that Adam's correction and schedules follow."""
    optimizer = hvd.DistributedOptimizer(
        kinds()[kind](), backward_passes_per_step=3, average_aggregated_gradients=average
    )
    weight, own = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    optimizer.register_local_var(own)
    if not kind.startswith("old"):
        optimizer.build([weight, own])
    _ = optimizer.iterations

    def step(factor: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight + own * own) * factor
        optimizer.apply_gradients(optimizer._compute_gradients(loss, [weight, own], tape=tape))

    stepping = tf.function(step) if in_graph else step
    found = []
    for number in range(7):
        stepping(tf.constant(hvd.rank() + 1.0 + number))
        found += [weight.numpy(), own.numpy(), int(optimizer.iterations), int(optimizer._agg_helper.counter.numpy())]
    return [*found, hvd.DistributedOptimizer(kinds()[kind]())._agg_helper]


@case(*KINDS)
def what_an_optimizer_is(hvd: Any, kind: str) -> Any:
    plain = kinds()[kind]()
    optimizer = hvd.DistributedOptimizer(plain)
    return [
        type(optimizer).__name__,
        isinstance(optimizer, type(plain)),
        float(optimizer.learning_rate),
        sorted(optimizer.get_config()),
        hasattr(optimizer, "register_local_var"),
    ]


@differs("Horovod leaves the factor out", ValueError)
def a_factor_of_a_sum(hvd: Any) -> Any:
    return hvd.DistributedOptimizer(kinds()["sgd"](), op=hvd.Sum, gradient_predivide_factor=2.0) is None


@case(
    ("op", lambda hvd: {"op": 3}),
    ("groups", lambda hvd: {"groups": -1}),
    ("mean of nothing", lambda hvd: {"nothing": 1}),
)
def an_optimizer_with_wrong(hvd: Any, name: str, arguments: Any) -> Any:
    del name
    return hvd.DistributedOptimizer(kinds()["sgd"](), **arguments(hvd)) is None


@case(*KINDS)
def a_model_that_is_loaded(hvd: Any, kind: str) -> Any:
    model = model_of()
    model.compile(optimizer=hvd.DistributedOptimizer(kinds()[kind]()), loss="mse")
    model.fit(*data_of(hvd), batch_size=4, verbose=0, shuffle=False)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.h5")
        model.save(path)
        loaded = hvd.load_model(path, legacy_opts=kind.startswith("old"))
    loaded.fit(*data_of(hvd), batch_size=4, verbose=0, shuffle=False)
    return [type(loaded.optimizer).__name__, loaded.get_weights()]


KERAS_3 = "Horovod takes the layers and the backend of Keras 3 for it"


@differs(KERAS_3, lambda value: len(value) == 3)
def callbacks(hvd: Any) -> Any:
    model = model_of()
    model.set_weights([weight + hvd.rank() for weight in model.get_weights()])
    model.compile(optimizer=hvd.DistributedOptimizer(kinds()["sgd"]()), loss="mse")
    chosen = [hvd.callbacks.BroadcastGlobalVariablesCallback(1), hvd.callbacks.MetricAverageCallback()]
    history = model.fit(*data_of(hvd), batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=chosen)
    return [history.history["loss"], model.get_weights()]


@differs(KERAS_3, lambda value: len(value) == 5, True, False)
def a_local_layer(hvd: Any, scale: bool) -> Any:
    model = model_of()
    optimizer = hvd.PartialDistributedOptimizer(
        kinds()["sgd"](), local_layers=[model.layers[0]], scale_local_gradients=scale
    )
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(*data_of(hvd), batch_size=4, epochs=1, verbose=0, shuffle=False)
    return model.get_weights()


# Callbacks, one by one


def fitted_with(hvd: Any, callbacks: list[Any], kind: str = "sgd", **arguments: Any) -> Any:
    model = model_of()
    model.set_weights([weight + hvd.rank() for weight in model.get_weights()])
    model.compile(optimizer=hvd.DistributedOptimizer(kinds()[kind]()), loss="mse")
    given = {"batch_size": 4, "epochs": 3, "verbose": 0, "shuffle": False, **arguments}
    history = model.fit(*data_of(hvd), callbacks=callbacks, **given)
    rates = [float(rate) for rate in history.history.get("lr", [])]
    return [history.history["loss"], rates, float(model.optimizer.learning_rate), model.get_weights()]


@differs("Horovod trains the first batch before it broadcasts", lambda value: len(value) == 5, "sgd", "old sgd")
def a_broadcast_callback(hvd: Any, kind: str) -> Any:
    return fitted_with(hvd, [hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=1, device="")], kind)


@case()
def a_broadcast_callback_with_local_variables(hvd: Any) -> Any:
    model = model_of()
    model.set_weights([weight + hvd.rank() for weight in model.get_weights()])
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[model.layers[0].kernel])
    callback.register_local_var(model.layers[1].bias)
    callback.set_model(model)
    model.compile(optimizer=kinds()["sgd"](), loss="mse")
    callback.on_batch_end(0)
    return model.get_weights()


@differs(KERAS_3, lambda value: len(value) == 4)
def a_metric_callback(hvd: Any) -> Any:
    callback = hvd.callbacks.MetricAverageCallback(device="")
    model = model_of()
    model.compile(optimizer=kinds()["sgd"](), loss="mse")
    callback.set_model(model)
    logs = {"loss": 1.0 + hvd.rank(), "accuracy": 0.5}
    callback.on_epoch_end(0, logs)
    return [logs["loss"], logs["accuracy"], hvd.rank()]


RATES = {
    "constant": {"multiplier": 0.5},
    "function": {"multiplier": lambda epoch: 1.0 / (epoch + 1)},
    "window": {"multiplier": 0.1, "start_epoch": 1, "end_epoch": 2},
    "smooth": {"multiplier": lambda epoch: 1.0 / (epoch + 1), "staircase": False, "steps_per_epoch": 4},
    "no correction": {"multiplier": 0.5, "momentum_correction": False},
}


@differs(KERAS_3, lambda value: len(value) == 5, *RATES)
def a_schedule_callback(hvd: Any, name: str) -> Any:
    return fitted_with(hvd, [hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.2, **RATES[name])])


@differs(KERAS_3, lambda value: len(value) == 5, True, False)
def a_warmup_callback(hvd: Any, momentum_correction: bool) -> Any:
    callback = hvd.callbacks.LearningRateWarmupCallback(
        initial_lr=0.2, warmup_epochs=2, momentum_correction=momentum_correction, steps_per_epoch=4, verbose=0
    )
    return fitted_with(hvd, [callback])


@case("schedule", "warmup")
def a_rate_callback_without_a_rate(hvd: Any, kind: str) -> Any:
    if kind == "schedule":
        return hvd.callbacks.LearningRateScheduleCallback(None, 0.5)
    return hvd.callbacks.LearningRateWarmupCallback(None)


@case()
def a_schedule_callback_without_steps(hvd: Any) -> Any:
    callback = hvd.callbacks.LearningRateScheduleCallback(0.2, lambda epoch: 1.0, staircase=False)
    callback.set_model(model_of())
    callback.set_params({})
    return callback.on_train_begin()


@case(False, True)
def a_checkpoint_callback(hvd: Any, weights_only: bool) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        callback = hvd.callbacks.BestModelCheckpoint(
            monitor="loss", verbose=0, save_weights_only=weights_only, mode="min", save_freq="epoch"
        )
        callback.filepath = os.path.join(folder, "best.weights.h5" if weights_only else "best.h5")
        fitted_with(hvd, [callback])
        return [os.path.exists(callback.filepath), callback.save_best_only, callback.monitor]


# Elastic


def elastic_of(hvd: Any, kind: str) -> Any:
    model = model_of()
    model.set_weights([weight + hvd.rank() for weight in model.get_weights()])
    model.compile(optimizer=kinds()[kind](), loss="mse")
    model.fit(*data_of(hvd), batch_size=4, verbose=0, shuffle=False)
    return hvd.elastic.KerasState(model, batch=hvd.rank(), epoch=0)


@case("old sgd", "old adam")
def an_elastic_state(hvd: Any, kind: str) -> Any:
    state = elastic_of(hvd, kind)
    found = [state.model.get_weights()]
    state.save()
    state.model.set_weights([weight + 1.0 for weight in state.model.get_weights()])
    state.batch = 7
    state.restore()
    found += [state.model.get_weights(), state.batch]
    state.sync()
    found += [state.model.get_weights(), state.batch, state.epoch]
    found += [[np.array(each) for each in state.optimizer.variables()]]
    state.commit()
    return found


@case()
def an_elastic_state_of_a_model_that_is_not_built(hvd: Any) -> Any:
    return hvd.elastic.KerasState(tf.keras.Sequential([tf.keras.layers.Dense(1)]), kinds()["old sgd"]())


@case()
def elastic_callbacks(hvd: Any) -> Any:
    state = elastic_of(hvd, "old sgd")
    noted: list[Any] = []

    class Noting(hvd.elastic.CommitStateCallback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            noted.append(["epoch", epoch, state.batch, state.epoch, self.batches_remaining])

    chosen = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        Noting(state, batches_per_commit=3),
    ]
    state.batch = 0
    state.model.fit(*data_of(hvd), batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=chosen)
    return [noted, state.batch, state.epoch, chosen[1].initial_epoch]


@case()
def elastic_callbacks_step_by_step(hvd: Any) -> Any:
    state = elastic_of(hvd, "old sgd")
    batch, epoch = hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state)
    batch.set_params({"steps": 8})
    found = []
    state.batch, state.epoch = 3, 2
    for callback in (batch, epoch):
        callback.on_train_begin()
        callback.on_epoch_begin(0)
    found.append(batch.params["steps"])
    batch.on_batch_end(4)
    found += [state.batch, state.epoch]
    for callback in (batch, epoch):
        callback.on_epoch_end(0)
    batch.on_epoch_begin(1)
    return [*found, state.batch, state.epoch, batch.params["steps"]]


@case()
def a_commit_callback_step_by_step(hvd: Any) -> Any:
    commits: list[int] = []

    class State:
        def commit(self) -> None:
            commits.append(len(commits))

    callback = hvd.elastic.CommitStateCallback(State(), 2)
    callback.on_train_begin()
    found = []
    for step in range(5):
        callback.on_batch_end(step)
        found.append(len(commits))
    callback.on_epoch_end(0)
    return [*found, len(commits), callback.batches_per_commit]


# The timeline, and what is built


@case()
def a_timeline(hvd: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        started = hvd.start_timeline(os.path.join(folder, "timeline.json"), mark_cycles=False)
        hvd.allreduce(values(hvd, 3), name="recorded")
        return [started, hvd.stop_timeline()]


@case("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_initialized", "nccl_built")
def a_place(hvd: Any, name: str) -> Any:
    return getattr(hvd, name)()


@case("ddl_built", "ccl_built", "cuda_built", "rocm_built", "gloo_built")
def a_part_that_is_built(hvd: Any, name: str) -> Any:
    return bool(getattr(hvd, name)())


@case()
def process_sets(hvd: Any) -> Any:
    added = hvd.add_process_set([0])
    return [
        isinstance(added, hvd.ProcessSet),
        added.included(),
        hvd.remove_process_set(added),
        list(hvd.global_process_set.ranks),
        hvd.init(),
    ]
