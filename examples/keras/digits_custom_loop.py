"""Reads handwritten digits with its own loop, in `tf.function`: a small convolutional net, offline.

    unidist launch -np 2 examples/keras/digits_custom_loop.py
    unidist launch -np 2 --strategy accumulate=2 examples/keras/digits_custom_loop.py
    python examples/keras/digits_custom_loop.py      # the same script alone

The lines that make it distributed are marked with (1) to (5); the rest is an ordinary TensorFlow script.
"""

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from save_plot import save_plot
from sklearn.datasets import load_digits
from tqdm import tqdm

import unidist.tensorflow as ud  # (1)

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


def evaluate(model: keras.Model, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the accuracy on the test images: each rank reads its share, the counts are added up."""
    found = tf.argmax(model(images[ud.data_rank() :: ud.data_size()], training=False), axis=1)
    correct = tf.reduce_sum(tf.cast(found == labels[ud.data_rank() :: ud.data_size()], tf.int64))
    return int(ud.allreduce(correct, op=ud.Sum, name="correct")) / NUM_TEST


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
    samples = ud.shard(tf.data.Dataset.from_tensor_slices(train), seed=args.seed)  # (3) each rank its share
    batches = samples.batch(args.batch_size)

    model, optimizer = ud.distribute(build(), keras.optimizers.AdamW(args.lr))  # (4)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(reduce_retracing=True)  # the last batch of an epoch is smaller
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = cross_entropy(labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)  # averages the gradients over the ranks before the step
        return loss

    losses, accuracies = [], []
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        bar = tqdm(batches, f"epoch {epoch}/{args.epochs}", disable=ud.rank() != 0)
        for images, labels in bar:
            loss = float(train_step(images, labels))
            total += loss
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        optimizer.flush()  # with --strategy accumulate=N: the last window of an epoch may be short
        losses.append(float(ud.allreduce(total / len(batches), name="loss")))  # (5) average over the ranks
        accuracies.append(evaluate(model, *test))
        if ud.rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}, test accuracy {accuracies[-1]:.2%}", flush=True)

    if ud.rank() == 0:
        print(f"accuracy {accuracies[-1]:.1%} on {NUM_TEST} images, {ud.size()} ranks")
        if args.plot:
            save_plot(args.plot, {"loss": {"training": losses}, "accuracy": {"test": accuracies}})
    ud.shutdown()


if __name__ == "__main__":
    main()
