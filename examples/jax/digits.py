"""Reads handwritten digits: a small net on scikit-learn's bundled 8x8 images, in JAX with optax, offline.

    unidist launch -np 2 examples/jax/digits.py
    unidist launch -np 2 --strategy accumulate=2 examples/jax/digits.py
    python examples/jax/digits.py                    # the same script alone

The five lines that make it distributed are marked with (1) to (5); the rest is an ordinary training script.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import unidist.jax as ud  # (1)

NUM_TEST = 360


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return 1437 images for training and 360 for testing; the same on every rank."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)  # (1797, 8, 8, 1)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:NUM_TEST], order[NUM_TEST:]
    return (images[train], digits.target[train]), (images[test], digits.target[test])


def build(key: Any) -> dict[str, Any]:
    """Return the parameters of a net of 69 thousand parameters."""
    shapes = {"conv1": (3, 3, 1, 32), "conv2": (3, 3, 32, 64), "dense": (64 * 4 * 4, 48), "head": (48, 10)}
    draw = jax.nn.initializers.he_normal()
    weights = [
        draw(each, shape) for each, shape in zip(jax.random.split(key, len(shapes)), shapes.values(), strict=True)
    ]
    return {name: {"w": w, "b": jnp.zeros(shape[-1])} for (name, shape), w in zip(shapes.items(), weights, strict=True)}


def logits_of(params: dict[str, Any], images: Any) -> Any:
    """Return logits `(batch, 10)`."""
    x = images
    for name in ("conv1", "conv2"):
        x = jax.lax.conv_general_dilated(
            x, params[name]["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params[name]["b"])
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["dense"]["w"] + params["dense"]["b"])
    return x @ params["head"]["w"] + params["head"]["b"]


def loss_fn(params: dict[str, Any], images: Any, labels: Any) -> Any:
    """Return the mean loss over a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels).mean()


def evaluate(params: dict[str, Any], test: tuple[np.ndarray, np.ndarray]) -> float:
    """Return the accuracy on the test images: each rank reads its share, the counts are added up."""
    images, labels = (part[ud.data_rank() :: ud.data_size()] for part in test)
    correct = jnp.sum(logits_of(params, images).argmax(1) == labels)
    return float(ud.allreduce(correct, op=ud.Sum, name="correct")) / NUM_TEST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW (default: 0.002)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    ud.init()  # (2)
    train, test = load()
    batches = ud.shard(train, batch_size=args.batch_size, seed=args.seed)  # (3) each rank its share

    params = build(jax.random.key(args.seed))
    params, optimizer = ud.distribute(params, optax.adamw(args.lr))  # (4)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any, Any]:
        loss, gradients = jax.value_and_grad(loss_fn)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)  # gradients are exchanged here
        return optax.apply_updates(params, updates), state, loss

    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for images, labels in batches:
            params, state, loss = step(params, state, images, labels)
            total += float(loss)
        params, state, _ = optimizer.flush(state, params)  # with accumulate=N an epoch's last window may be short
        mean_loss = float(ud.allreduce(total / len(batches), name="loss"))  # (5) average over the ranks
        accuracy = evaluate(params, test)
        if ud.rank() == 0:
            print(f"epoch {epoch}: loss {mean_loss:.4f}, test accuracy {accuracy:.2%}", flush=True)
    if ud.rank() == 0:
        print(f"test accuracy after {args.epochs} epochs on {ud.size()} process(es): {accuracy:.2%}")
    ud.shutdown()


if __name__ == "__main__":
    main()
