"""Writes Python: a small character-level transformer, trained with `fit` on the standard library's sources, offline.

    unidist launch -np 2 examples/keras/text_transformer.py
    unidist launch -np 2 --strategy accumulate=2 examples/keras/text_transformer.py --steps 800
    unidist launch -np 2 --strategy zero=3 examples/keras/text_transformer.py
    unidist launch -np 2 --strategy pipeline=2 examples/keras/text_transformer.py
    unidist launch -np 2 --strategy tensor=2 examples/keras/text_transformer.py
    python examples/keras/text_transformer.py        # the same script alone

The default takes about two minutes on two cores. The lines that make it distributed are marked with (1) to (5).
"""

import argparse
import json
import math
import sysconfig
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from save_plot import save_plot
from tqdm import tqdm

import unidist.keras as ud  # (1)
from unidist.runtime.context import current
from unidist.strategy.plan import StrategyLike

EPOCHS = 8  # after each the model is validated


class Text:
    """The standard library's modules, cut into windows of character codes; the last twentieth is for validation."""

    def __init__(self, context: int, num_modules: int | None) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_modules]
        text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in files)
        text = text.encode("ascii", "ignore").decode()
        self.alphabet = "".join(sorted(set(text)))
        code = {character: index for index, character in enumerate(self.alphabet)}
        codes = np.array([code[character] for character in text], dtype="uint8")
        windows = codes[: len(codes) // (context + 1) * (context + 1)].reshape(-1, context + 1)
        self.train, self.validation = np.split(windows, [len(windows) * 19 // 20])


class Embedding(layers.Layer):
    """Adds what a character is and where it stands."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.character, self.position = layers.Embedding(vocabulary, width), layers.Embedding(context, width)

    def call(self, codes: tf.Tensor) -> tf.Tensor:
        return self.character(codes) + self.position(keras.ops.arange(codes.shape[1]))


def build(vocabulary: int, context: int, depth: int, width: int, heads: int) -> keras.Model:
    """Return a net that gives for every place in a window (batch, context) the logits of the next character."""
    codes = keras.Input((context,), dtype="int32")
    x = Embedding(vocabulary, context, width)(codes)
    for _ in range(depth):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(normed, normed, use_causal_mask=True)
        normed = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(normed))
    return keras.Model(codes, layers.Dense(vocabulary)(layers.LayerNormalization()(x)))


def batches(windows: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    """Return batches of windows without their last character, and without their first."""
    windows = windows.map(lambda window: tf.cast(window, tf.int32)).batch(batch_size, drop_remainder=True)
    return windows.map(lambda window: (window[:, :-1], window[:, 1:])).prefetch(2)


def strategies() -> StrategyLike:
    """Return what the command line says, and that gradients are clipped, if it does not say how."""
    given = current().plan.strategies
    return None if any(each.name == "clip_norm" for each in given) else [*given, "clip_norm=1"]


class LossLog(keras.callbacks.Callback):
    """Keeps the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self._sum = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float]) -> None:
        self._sum = 0.0

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        total = logs["loss"] * (batch + 1)  # what Keras tells is the mean since the epoch began
        self.losses.append(total - self._sum)
        self._sum = total


class Progress(keras.callbacks.Callback):
    """A bar with the loss, and a line after each epoch."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.bar = tqdm(total=steps)

    def on_train_batch_end(self, batch: int, logs: dict[str, float]) -> None:
        self.bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)
        self.bar.update()

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        losses = f"loss {logs['loss']:.3f}, validation loss {logs['val_loss']:.3f}"
        self.bar.write(f"step {self.bar.n}: {losses}, perplexity {math.exp(logs['val_loss']):.1f}")

    def on_train_end(self, logs: dict[str, float]) -> None:
        self.bar.close()


def write(model: keras.Model, alphabet: str, start: str, length: int) -> str:
    """Return `start`, continued by the model."""
    generator = np.random.default_rng(0)
    context = model.input_shape[1]
    codes = [alphabet.index(character) for character in start]
    for _ in range(length):
        seen = codes[-context:]
        window = np.array([seen + [0] * (context - len(seen))], dtype="int32")  # nobody looks at what comes later
        logits = model.predict_on_batch(window)[0, len(seen) - 1].astype("float64") / 0.8
        chances = np.exp(logits - logits.max())
        codes.append(int(generator.choice(len(alphabet), p=chances / chances.sum())))
    return "".join(alphabet[code] for code in codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help=f"a multiple of {EPOCHS} (default: 400)")
    parser.add_argument(
        "--batch-size", type=int, default=16, help="windows per step and share of the data (default: 16)"
    )
    parser.add_argument("--global-batch-size", type=int, metavar="N", help="windows per step of all shares, instead")
    parser.add_argument("--context", type=int, default=128, help="characters per window (default: 128)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="largest learning rate (default: 0.002)")
    parser.add_argument("--modules", type=int, help="read only so many modules of the library (default: all)")
    parser.add_argument("--sample", type=int, default=400, help="characters to write at the end (default: 400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses into this picture")
    parser.add_argument("--loss-log", type=Path, metavar="FILE", help="write the loss of each step to this JSON file")
    args = parser.parse_args()
    if args.steps < EPOCHS or args.steps % EPOCHS:
        parser.error(f"--steps {args.steps} is no multiple of {EPOCHS}")

    ud.init()  # (2)
    leads = ud.rank() == 0
    ud.seed(args.seed)
    text = Text(args.context, args.modules)
    train = ud.shard(tf.data.Dataset.from_tensor_slices(text.train), seed=args.seed)  # (3) each rank its share
    validation = ud.shard(tf.data.Dataset.from_tensor_slices(text.validation), shuffle=False)  # (3)

    warmup = args.steps // 10
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, args.steps - warmup, alpha=0.1, warmup_target=args.lr, warmup_steps=warmup
    )
    model = build(len(text.alphabet), args.context, args.layers, args.width, args.heads)
    num_parameters = model.count_params()  # now: a rank may keep a part of the model
    model, optimizer = ud.distribute(model, keras.optimizers.AdamW(rate, weight_decay=0.1), strategies())  # (4)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    if leads:
        print(f"{text.train.size:,} characters, {num_parameters:,} parameters, {ud.size()} process(es)", flush=True)
    batch = (args.global_batch_size or 0) // ud.data_size() or args.batch_size
    log = LossLog()
    history = model.fit(
        batches(train, batch).repeat(),
        validation_data=batches(validation, batch),
        epochs=EPOCHS,
        steps_per_epoch=args.steps // EPOCHS,
        validation_steps=4,
        shuffle=False,
        callbacks=[log, ud.callbacks.MetricAverageCallback(), *([Progress(args.steps)] if leads else [])],  # (5)
        verbose=0,
    ).history

    losses = ud.allreduce(np.array(log.losses), name="losses")  # the mean over all shares of the data
    sample = write(model, text.alphabet, "def ", args.sample)  # on every rank: each may have a part of the model
    if leads:
        print(f"---- a sample ----\n{sample}", flush=True)
        if args.loss_log:
            args.loss_log.write_text(json.dumps({"loss": np.asarray(losses).tolist()}), encoding="utf-8")
        if args.plot:
            save_plot(args.plot, {"loss": {"training": history["loss"], "validation": history["val_loss"]}})
    ud.shutdown()


if __name__ == "__main__":
    main()
