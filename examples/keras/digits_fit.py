"""Reads handwritten digits with `model.fit`: a small convolutional net on scikit-learn's 8x8 images, offline.

    unidist launch -np 2 examples/keras/digits_fit.py
    unidist launch -np 2 --strategy accumulate=2 examples/keras/digits_fit.py
    python examples/keras/digits_fit.py              # the same script alone

Keras may run on TensorFlow or on JAX, as KERAS_BACKEND says.

The lines that make it distributed are marked with (1) to (4); the rest is an ordinary Keras script.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
from save_plot import save_plot
from sklearn.datasets import load_digits

import unidist.keras as ud  # (1)

NUM_TEST = 360


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return 1437 images for training and 360 for testing; the same on every rank."""
    digits = load_digits()
    images = digits.images[..., None].astype("float32") / 16  # (1797, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def build() -> keras.Model:
    """Return a net of 69 thousand parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(48, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw loss and accuracy into this picture")
    args = parser.parse_args()

    ud.init()  # (2)
    ud.seed(args.seed)  # each rank its own dropout; the weights come from rank 0
    train, test = load()
    samples = ud.shard(train, batch_size=args.batch_size, seed=args.seed)  # (3) each rank its share

    model, optimizer = ud.distribute(build(), keras.optimizers.AdamW(args.lr))  # (4)
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend() == "jax",  # on TensorFlow what XLA compiles cannot exchange gradients
    )
    history = model.fit(
        samples,
        validation_data=test,  # every rank has the same weights, so every rank finds the same
        epochs=args.epochs,
        shuffle=False,
        verbose=2 if ud.rank() == 0 else 0,
    ).history

    if ud.rank() == 0:
        print(f"accuracy {history['val_accuracy'][-1]:.1%} on {NUM_TEST} images, {ud.size()} ranks")
        if args.plot:
            save_plot(args.plot, {"loss": {"training": history["loss"]}, "accuracy": {"test": history["val_accuracy"]}})
    ud.shutdown()


if __name__ == "__main__":
    main()
