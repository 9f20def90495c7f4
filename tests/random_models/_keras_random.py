"""Random models in Keras on TensorFlow, trained in one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from _model_programs import WORDS, Program, Vocabulary
from _trained import Piece, Pieces
from keras import ops

import unidist.keras as ud
from unidist.checkpoint import read_whole
from unidist.checkpoint.format.reader import Checkpoint
from unidist_arrays.memory import array_of_buffer
from unidist_expert_parallel.keras import MixtureOfExperts

L = keras.layers


@keras.saving.register_keras_serializable("unidist_tests")
class Scale(L.Layer):  # type: ignore[misc,name-defined]  # Keras has no types
    """Multiplies by a variable."""

    def build(self, shape: Any) -> None:
        """Make the variable."""
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x: Any) -> Any:
        """Multiply."""
        return x * self.scale


@keras.saving.register_keras_serializable("unidist_tests")
class Positions(L.Layer):  # type: ignore[misc,name-defined]
    """Adds a row of a table for each position."""

    def build(self, shape: Any) -> None:
        """Make the table."""
        self.table = self.add_weight(shape=(9, shape[-1]), initializer="ones", name="table")

    def call(self, x: Any) -> Any:
        """Add."""
        return x + self.table[: x.shape[1]]


@keras.saving.register_keras_serializable("unidist_tests")
class Own(L.Layer):  # type: ignore[misc,name-defined]
    """A layer that is made of layers."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(**options)
        self.norm = L.LayerNormalization(name="norm")
        self.up, self.down = L.Dense(2 * width, "gelu", name="up"), L.Dense(width, name="down")

    def build(self, shape: Any) -> None:
        """Make the variables."""
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 2 * shape[-1]))

    def call(self, x: Any) -> Any:
        """Compute."""
        return self.down(self.up(self.norm(x)))


New = Callable[..., Any]
"""Makes a layer of a class, with arguments, and a name of its own."""


def _attended(new: New, kind: Any, *sizes: int) -> Callable[..., Any]:
    def call(x: Any, **options: Any) -> Any:
        return new(kind, *sizes)(x, x, **options)

    return call


def _squeezed(x: Any, new: New, width: int) -> Any:
    mean = new(L.GlobalAveragePooling1D)(x)
    gate = new(L.Dense, width, "sigmoid")(new(L.Dense, 2, "tanh")(mean))
    return new(L.Multiply)([x, new(L.Reshape, (1, width))(gate)])


def _twice(x: Any, new: New, width: int) -> Any:
    layer = new(L.Dense, width, "tanh")
    return layer(layer(x))


def _image(x: Any, new: New, width: int) -> Any:
    image = new(L.Reshape, (x.shape[1], width, 1))(x)
    image = new(L.Conv2D, 1, 1)(new(L.Conv2D, 2, 3, padding="same", activation="tanh")(image))
    return new(L.Reshape, (x.shape[1], width))(image)


_BLOCKS: dict[str, Callable[[Any, int, int, New], Any]] = {
    "dense": lambda x, w, n, new: new(L.Dense, w)(x),
    "no_bias": lambda x, w, n, new: new(L.Dense, w, use_bias=False)(x),
    "mlp": lambda x, w, n, new: new(L.Dense, w)(new(L.Dense, 2 * w, "gelu")(x)),
    "swiglu": lambda x, w, n, new: new(L.Dense, w)(new(L.Multiply)([new(L.Dense, 5, "silu")(x), new(L.Dense, 5)(x)])),
    "bottleneck": lambda x, w, n, new: new(L.Dense, w)(new(L.LayerNormalization)(new(L.Dense, 2)(x))),
    "squeeze_excite": lambda x, w, n, new: _squeezed(x, new, w),
    "own": lambda x, w, n, new: new(Own, w)(x),
    "scale": lambda x, w, n, new: new(Scale)(x),
    "positions": lambda x, w, n, new: new(Positions)(x),
    "conv1d": lambda x, w, n, new: new(L.Conv1D, w, 3, padding="same")(x),
    "conv1d_causal": lambda x, w, n, new: new(L.Conv1D, w, 2, padding="causal")(x),
    "depthwise": lambda x, w, n, new: new(L.DepthwiseConv1D, 3, padding="same")(x),
    "separable": lambda x, w, n, new: new(L.SeparableConv1D, w, 3, padding="same")(x),
    "conv_transpose": lambda x, w, n, new: new(L.Conv1DTranspose, w, 3, padding="same")(x),
    "conv2d": lambda x, w, n, new: _image(x, new, w),
    "layer_norm": lambda x, w, n, new: new(L.LayerNormalization)(x),
    "rms_norm": lambda x, w, n, new: new(L.RMSNormalization, epsilon=1e-2)(x),
    "group_norm": lambda x, w, n, new: new(L.GroupNormalization, n)(x),
    "batch_norm_in_evaluation": lambda x, w, n, new: new(L.BatchNormalization, trainable=False)(x),
    "multihead": lambda x, w, n, new: _attended(new, L.MultiHeadAttention, n, w // n)(x),
    "multihead_causal": lambda x, w, n, new: _attended(new, L.MultiHeadAttention, 2, 3)(x, use_causal_mask=True),
    "grouped_attention": lambda x, w, n, new: _attended(new, L.GroupQueryAttention, 2, 2, 1)(x),
    "dot_attention": lambda x, w, n, new: new(L.Attention)([new(L.Dense, w)(x), x]),
    "additive_attention": lambda x, w, n, new: new(L.AdditiveAttention)([x, new(L.Dense, w)(x)]),
    "simple_rnn": lambda x, w, n, new: new(L.SimpleRNN, w, return_sequences=True)(x),
    "gru": lambda x, w, n, new: new(L.GRU, w, return_sequences=True)(x),
    "lstm": lambda x, w, n, new: new(L.LSTM, w, return_sequences=True)(x),
    "bidirectional": lambda x, w, n, new: new(L.Bidirectional, new(L.GRU, w // 2, return_sequences=True))(x),
    "time_distributed": lambda x, w, n, new: new(L.TimeDistributed, new(L.Dense, w))(x),
    "einsum_dense": lambda x, w, n, new: new(L.EinsumDense, "btw,wv->btv", output_shape=(None, w), bias_axes="v")(x),
    "prelu": lambda x, w, n, new: new(L.PReLU, alpha_initializer="ones", shared_axes=[1])(x),
    "no_dropout": lambda x, w, n, new: new(L.Dense, w)(new(L.Dropout, 0.0)(x)),
    "twice": lambda x, w, n, new: _twice(x, new, w),
    "max_pool": lambda x, w, n, new: new(L.MaxPooling1D, 2, strides=1, padding="same")(new(L.Dense, w)(x)),
    "permuted": lambda x, w, n, new: new(L.Permute, (2, 1))(new(L.Dense, x.shape[1])(new(L.Permute, (2, 1))(x))),
    "concatenated": lambda x, w, n, new: new(L.Concatenate)([new(L.Dense, w // 2)(x), new(L.Dense, w // 2, "tanh")(x)]),
    "cumsum": lambda x, w, n, new: ops.cumsum(new(L.Dense, w)(x), axis=1) / 4,
    "mean_of_tokens": lambda x, w, n, new: new(L.Dense, w)(x) + ops.mean(x, axis=1, keepdims=True),
    "experts": lambda x, w, n, new: new(MixtureOfExperts, 4, hidden=3, top_k=n)(x),
}


class Chain(keras.Model):  # type: ignore[misc]
    """Calls its layers one after the other, in Python."""

    def __init__(self, chain: list[Any]) -> None:
        super().__init__(name="model")
        self.chain = chain

    def call(self, x: Any) -> Any:
        """Compute."""
        for layer in self.chain:
            x = layer(x)
        return x


def make(program: Program) -> Any:
    """Return the built model with the same random values everywhere, none of them zero."""
    width = program.width
    keras.utils.set_random_seed(program.seed)
    inputs = keras.Input((program.tokens, *(() if program.words else (width,))), name="given")
    first = L.Embedding(WORDS, width, name="first") if program.words else L.Dense(width, name="first")
    x = first(inputs)
    for number, block in enumerate(program.all_blocks):
        count = [0]

        def new(kind: Any, *args: Any, _number: int = number, _count: list[int] = count, **options: Any) -> Any:
            _count[0] += 1
            return kind(*args, name=f"b{_number}_{_count[0]}", **options)

        given = x if program.container == "functional" else keras.Input(x.shape[1:])
        found = _BLOCKS[block.kind](given, width, block.size, new)
        found = new(L.Add)([given, found]) if block.residual else found
        if program.container != "functional":
            inner = keras.Model(given, found, name=f"b{number}")
            inner.trainable = not block.frozen
            found = inner(x)
        x = found
    x = L.LayerNormalization(name="norm")(x)
    if program.pooled:
        x = L.GlobalAveragePooling1D(name="pool")(x)
    model = keras.Model(inputs, L.Dense(WORDS, name="last")(x), name="model")
    if program.container == "subclassed":
        model = Chain(model.layers[1:])
        model(np.zeros((1, *inputs.shape[1:])))
    rng = np.random.default_rng(program.seed)
    for variable in model.trainable_variables:
        variable.assign(variable.numpy() + 0.3 * rng.standard_normal(variable.shape))
    return model


_OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], tuple[tuple[str, Any], ...]]] = {
    "sgd": (keras.optimizers.SGD, {"learning_rate": 0.0625}, (("weight_decay", 0.125), ("clipvalue", 0.125))),
    "momentum": (
        keras.optimizers.SGD,
        {"learning_rate": 0.0625, "momentum": 0.875},
        (("nesterov", True), ("global_clipnorm", 0.25), ("clipnorm", 0.25), ("use_ema", True)),
    ),
    "adamw": (
        keras.optimizers.AdamW,
        {"learning_rate": 0.01, "weight_decay": 0.1, "epsilon": 1e-3},
        (("amsgrad", True), ("global_clipnorm", 0.25), ("use_ema", True)),
    ),
    "adam": (keras.optimizers.Adam, {"learning_rate": 0.01, "epsilon": 1e-3}, (("amsgrad", True), ("clipnorm", 0.25))),
    "nadam": (keras.optimizers.Nadam, {"learning_rate": 0.01, "epsilon": 1e-3}, (("weight_decay", 0.1),)),
    "rmsprop": (keras.optimizers.RMSprop, {"learning_rate": 0.01, "epsilon": 1e-2}, (("momentum", 0.5),)),
    "adagrad": (keras.optimizers.Adagrad, {"learning_rate": 0.01, "epsilon": 1e-3}, (("weight_decay", 0.1),)),
    "adadelta": (keras.optimizers.Adadelta, {"learning_rate": 0.5, "epsilon": 1e-3}, ()),
    "adamax": (keras.optimizers.Adamax, {"learning_rate": 0.01, "epsilon": 1e-3}, (("weight_decay", 0.1),)),
    "ftrl": (keras.optimizers.Ftrl, {"learning_rate": 0.01}, ()),
    "lamb": (keras.optimizers.Lamb, {"learning_rate": 0.01, "epsilon": 1e-3}, ()),
}

_LOSSES: dict[str, Callable[[], Any]] = {
    "mse": keras.losses.MeanSquaredError,
    "cross_entropy": lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    "huber": keras.losses.Huber,
    "mae": keras.losses.MeanAbsoluteError,
}


def _is_sensible(program: Program) -> bool:
    # All but a loop of the script's own take ranks as equal.
    # Each `fit` ends with the moving averages in place of the weights.
    averages = program.way == "fit" and ("use_ema", True) in program.options
    return not averages and not (program.way != "loop" and program.uneven)


VOCABULARY = Vocabulary(
    framework="keras",
    kinds=tuple(_BLOCKS),
    containers=("functional", "nested", "subclassed"),
    optimizers={name: options for name, (_, _, options) in _OPTIMIZERS.items()},
    whole=("lamb",),
    losses=tuple(_LOSSES),
    ways=("step", "fit", "loop"),
    items=(
        ("accumulate=2", "accumulate=3"),
        (
            *("zero=1", "zero=1:whole=true", "zero=1:bucket_mb=0.0002", "zero=1:shard=2", "zero=2"),
            *("zero=2:bucket_mb=0.0002", "zero=3", "zero=3:whole=true"),
        ),
        ("tensor=2", "tensor=2:sequence=true"),
        ("pipeline=2:microbatches=2", "pipeline=2", "pipeline=2:microbatches=4:schedule=interleaved"),
        ("context=2", "context=2:exchange=gather"),
        ("expert=2",),
        ("activations=recompute",),
        ("clip_norm=0.3", "clip_norm=0.3:p=inf"),
        ("clip_value=0.01",),
        ("data", "data:bucket_mb=0.0002", "parameter_server=sync"),
    ),
    engines=("shm", "tcp"),
    sensible=_is_sensible,
)


@contextmanager
def _in_float64() -> Iterator[None]:
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.clear_session(free_memory=False)
    try:
        yield
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(before)


def _added(first: Any, second: Any) -> Any:
    """Return the sum of two gradients: of two sparse ones the occurrences of both."""
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        values = tf.concat([first.values, second.values], 0)
        return tf.IndexedSlices(values, tf.concat([first.indices, second.indices], 0), first.dense_shape)
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)


def _optimizer(program: Program) -> Any:
    kind, options, _ = _OPTIMIZERS[program.optimizer]
    options = {**options, **dict(program.options)}
    if program.schedule:
        options["learning_rate"] = keras.optimizers.schedules.InverseTimeDecay(options["learning_rate"], 1, 0.5)
    return kind(**options)


def alone(program: Program, *, pieces: int) -> Generator[float, None, Pieces]:
    """Train in this process, without unidist; see the module for PyTorch."""
    with _in_float64():
        model, optimizer, loss_fn = make(program), _optimizer(program), _LOSSES[program.loss]()
        variables = model.trainable_variables
        optimizer.build(variables)
        for update in range(program.updates * len(program.jobs)):
            total, summed = 0.0, []
            items = program.jobs[0].items
            # Keras' Adam squares the gradient of each occurrence of a word; to unidist's clipping it is one row.
            keep = not {"clip_norm", "clip_value"} & items.keys()
            for turn in range(program.passes):
                inputs, targets = program.data(update, turn)
                for number in reversed(range(pieces)):
                    part = program.share(number, pieces)
                    weight = len(inputs[part]) / len(inputs) / program.passes
                    with tf.GradientTape() as tape:
                        loss = loss_fn(targets[part], model(inputs[part], training=True)) * weight
                    gradients = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
                    gradients = [each if keep else tf.convert_to_tensor(each) for each in gradients]
                    summed = [_added(a, b) for a, b in zip(summed, gradients, strict=True)] if summed else gradients
                    total += float(loss)
            for name, value in items.items():
                limit, _, order = value.partition(":p=")
                if name == "clip_norm":
                    flat = tf.concat([tf.reshape(each, [-1]) for each in summed], 0)
                    norm = tf.norm(flat, ord=np.inf if order == "inf" else float(order or 2))
                    summed = [
                        each * tf.minimum(tf.cast(1.0, norm.dtype), float(limit) / (norm + 1e-6)) for each in summed
                    ]
                elif name == "clip_value":
                    summed = [tf.clip_by_value(each, -float(limit), float(limit)) for each in summed]
            optimizer.apply(summed, variables)
            yield total
            if (update + 1) % program.updates == 0:
                inputs, targets = program.data(update, program.passes)
                yield float(loss_fn(targets, model(inputs, training=False)))
        return [Piece(each.path.removeprefix("model/"), None, each.numpy().copy()) for each in model.weights]


def on_rank(program: Program, number: int, folder: str) -> Generator[float, None, Pieces]:
    """Train one job of the program on this rank; see the module for PyTorch."""
    with _in_float64():
        model, optimizer, loss_fn = make(program), _optimizer(program), _LOSSES[program.loss]()
        if number:
            for variable in model.trainable_variables:
                variable.assign(0.5 * variable.numpy())
        step: Any = None
        if program.way == "step":
            step = ud.TrainStep(model, optimizer, loss_fn)
            model = step.model
        else:
            model, optimizer = ud.distribute(model, optimizer)
            model.compile(optimizer, loss_fn, jit_compile=False)
        if number:
            ud.load(f"{folder}/{number - 1}", model, optimizer)
        mine = program.share(ud.data_rank(), ud.data_size())
        weight = (mine.stop - mine.start) * ud.data_size() / program.batch
        for update in range(number * program.updates, (number + 1) * program.updates):
            total = 0.0
            for turn in range(program.passes):
                inputs, targets = (x[mine] for x in program.data(update, turn))
                if step is not None:
                    total += float(step(inputs, targets)) / program.passes
                    continue
                if program.way == "fit":
                    history = model.fit(inputs, targets, batch_size=len(inputs), shuffle=False, verbose=0)
                    loss = history.history["loss"][0]
                else:
                    with tf.GradientTape() as tape:
                        loss = loss_fn(targets, model(inputs, training=True)) * weight
                    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
                mean = ud.allreduce(tf.constant(float(loss), tf.float64), name=f"loss {update} {turn}")
                total += float(mean) / program.passes
            yield total
        inputs, targets = (x[mine] for x in program.data(update, program.passes))
        if step is not None:
            yield float(step.evaluate(inputs, targets))
        else:
            loss = loss_fn(targets, model(inputs, training=False)) * weight
            yield float(ud.allreduce(tf.constant(float(loss), tf.float64), name="evaluation"))
        ud.save(f"{folder}/{number}", model, optimizer)
        if ud.rank():
            return []
        with Checkpoint(Path(folder, str(number))) as opened:
            section = opened.section("model")
            return [
                Piece(name.removeprefix("model/"), None, array_of_buffer(read_whole(section, info), info.shape).copy())
                for name, info in section.tensors.items()
            ]
