"""Writes Python: a small character-level GPT in JAX, trained on the standard library's own sources, offline.

    unidist launch -np 2 examples/jax/char_gpt.py
    unidist launch -np 2 --strategy clip_norm=0.5,accumulate=2 examples/jax/char_gpt.py --steps 800
    python examples/jax/char_gpt.py                  # the same script alone

The default takes about two minutes on two cores. `TrainStep` compiles the whole step; gradients are exchanged while the
backward pass runs.
"""

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import unidist.jax as ud
from unidist.runtime import current
from unidist.strategy.plan import StrategyLike

# In names and comments: B batch, T time (characters), C channels (width), H heads, V vocabulary.


def read(num_modules: int | None) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the alphabet, and the standard library's modules as character codes: to train on, and to validate."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_modules]
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in files)
    text = text.encode("ascii", "ignore").decode()
    alphabet = "".join(sorted(set(text)))
    code = {character: index for index, character in enumerate(alphabet)}
    codes = np.array([code[character] for character in text], np.int32)
    cut = len(codes) * 19 // 20
    return alphabet, codes[:cut], codes[cut:]


def draw(codes: np.ndarray, batch: int, context: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's share of `batch` random windows, and the same one character later; every rank draws alike."""
    starts = rng.integers(len(codes) - context - 1, size=batch)[ud.data_rank() :: ud.data_size()]
    windows = codes[starts[:, None] + np.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def build(key: Any, vocabulary: int, context: int, layers: int, width: int) -> dict[str, Any]:
    """Return the parameters; the embedding is the output layer, too."""

    def normal(key: Any, *shape: int) -> Any:
        return 0.02 * jax.random.normal(key, shape)

    def norm() -> dict[str, Any]:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def block(key: Any) -> dict[str, Any]:
        qkv, project, up, down = jax.random.split(key, 4)
        return {
            "norm1": norm(), "qkv": normal(qkv, width, 3 * width), "project": normal(project, width, width),
            "norm2": norm(), "up": normal(up, width, 4 * width), "down": normal(down, 4 * width, width),
        }  # fmt: skip

    keys = jax.random.split(key, layers + 2)
    return {
        "embed": normal(keys[0], vocabulary, width),
        "position": normal(keys[1], context, width),
        "blocks": [block(each) for each in keys[2:]],
        "norm": norm(),
    }


def normalize(x: Any, norm: dict[str, Any]) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]


def logits_of(params: dict[str, Any], codes_BT: Any, heads: int) -> Any:  # noqa: N803 - shape legend
    """Return logits (B, T, V)."""
    time = codes_BT.shape[1]
    x_BTC = params["embed"][codes_BT] + params["position"][:time]  # noqa: N806
    for block in params["blocks"]:
        qkv = normalize(x_BTC, block["norm1"]) @ block["qkv"]
        q, k, v = (part.reshape(*part.shape[:2], heads, -1) for part in jnp.split(qkv, 3, -1))  # (B, T, H, C/H) each
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x_BTC.shape)
        x_BTC = x_BTC + attended @ block["project"]  # noqa: N806
        x_BTC = x_BTC + jax.nn.gelu(normalize(x_BTC, block["norm2"]) @ block["up"]) @ block["down"]  # noqa: N806
    return normalize(x_BTC, params["norm"]) @ params["embed"].T


def write(params: dict[str, Any], alphabet: str, length: int, context: int, heads: int) -> str:
    """Return text of the model's own."""
    key = jax.random.key(0)
    codes = [alphabet.index(character) for character in "def "]
    run = jax.jit(lambda codes: logits_of(params, codes, heads))
    for _ in range(length):
        last = codes[-context:]
        padded = np.array([last + [0] * (context - len(last))])  # one shape, so that it is compiled once
        key, own = jax.random.split(key)
        codes.append(int(jax.random.categorical(own, run(padded)[0, len(last) - 1] / 0.8)))
    return "".join(alphabet[code] for code in codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32, help="windows per step of all ranks (default: 32)")
    parser.add_argument("--context", type=int, default=128, help="characters per window (default: 128)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="largest learning rate (default: 0.002)")
    parser.add_argument("--modules", type=int, help="read only so many modules of the library (default: all)")
    parser.add_argument("--sample", type=int, default=400, help="characters to write at the end (default: 400)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    ud.init()
    leads = ud.rank() == 0
    alphabet, train, validation = read(args.modules)
    params = build(jax.random.key(args.seed), len(alphabet), args.context, args.layers, args.width)

    def loss_fn(params: dict[str, Any], inputs: Any, targets: Any) -> Any:
        logits = logits_of(params, inputs, args.heads)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    schedule = optax.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 10, args.steps, args.lr / 10)
    given = current().plan.strategies
    clipped: StrategyLike = None if any(each.name == "clip_norm" for each in given) else [*given, "clip_norm=1"]
    step = ud.TrainStep(loss_fn, params, optax.adamw(schedule), strategy=clipped)

    rng = np.random.default_rng(args.seed)
    for number in range(1, args.steps + 1):
        loss = step(*draw(train, args.batch_size, args.context, rng))
        if leads and number % max(args.steps // 8, 1) == 0:
            print(f"step {number}: loss {float(loss):.3f}", flush=True)
    held_out = np.random.default_rng(1000)
    batches = [draw(validation, args.batch_size, args.context, held_out) for _ in range(4)]
    losses = [float(step.evaluate(*each)) for each in batches]
    if leads:
        print(f"validation loss after {args.steps} steps on {ud.size()} process(es): {sum(losses) / len(losses):.3f}")
        print(write(step.params, alphabet, args.sample, args.context, args.heads))
    ud.shutdown()


if __name__ == "__main__":
    main()
