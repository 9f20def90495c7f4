"""Learning curves of sync, bounded and asynchronous steps with one slow worker: a plot over time and over samples.

    python -m benchmarks.learning_curves docs/learning-curves.svg

The model is the character GPT of the examples, smaller. Computing is mostly a sleep, so that workers do not compete for
the cores; the last of three workers sleeps twice as long. Run by `unidist launch` the module is one rank:

    python -m benchmarks.learning_curves RESULT SECONDS STRATEGY
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT, under_unidist

STRATEGIES = {
    "sync": "parameter_server=sync",
    "staleness=4": "parameter_server=async:staleness=4",
    "async": "parameter_server=async",
}
WORKERS, STEP_SEC, SECONDS = 3, 0.02, 60
BATCH, CONTEXT, LAYERS, WIDTH, HEADS = 16, 32, 1, 32, 4
RATE, VALIDATION, EVERY_SEC = 3e-3, 64, 2.0


def train(strategy: str, seconds: float) -> list[tuple[float, float, float]]:
    """Return time in seconds, samples of all workers, and loss on validation data, as they went on.

    Args:
        strategy: the strategy line.
        seconds: how long this rank trains.
    """
    import torch

    import unidist.torch as ud

    sys.path.insert(0, str(ROOT / "examples" / "torch"))
    import char_gpt

    torch.set_num_threads(1)
    text = char_gpt.Text(40)
    torch.manual_seed(0)
    model: Any = char_gpt.GPT(len(text.alphabet), CONTEXT, LAYERS, WIDTH, HEADS)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=RATE)
    model, optimizer = ud.distribute(model, optimizer, strategy)
    generator = torch.Generator().manual_seed(1 + ud.rank())
    validation = char_gpt.draw(text.validation, VALIDATION, CONTEXT, torch.Generator().manual_seed(1000))
    pause = STEP_SEC * (2 if ud.rank() == ud.size() - 1 else 1)
    own: list[tuple[float, int]] = []
    curve: list[tuple[float, float]] = []
    ud.barrier()
    begun = time.monotonic()
    steps, together = 0, "async" not in strategy
    # Together every rank makes the same number of steps: that of the slow one.
    last = round(seconds / (2.2 * STEP_SEC)) if together else 1 << 30
    while steps < last and (together or time.monotonic() - begun < seconds):
        if ud.rank() == 0 and time.monotonic() - begun >= EVERY_SEC * len(curve):
            with torch.no_grad():
                loss = float(char_gpt.next_character_loss(model(validation[0]), validation[1]))
            curve.append((time.monotonic() - begun, loss))
        inputs, targets = char_gpt.draw(text.train, BATCH, CONTEXT, generator)
        optimizer.zero_grad()
        char_gpt.next_character_loss(model(inputs), targets).backward()
        time.sleep(pause)
        optimizer.step()
        steps += 1
        own.append((time.monotonic() - begun, BATCH * steps))
    every = ud.allgather_object(own)
    return [(at, sum(_until(each, at) for each in every), loss) for at, loss in curve]


def _until(counts: list[tuple[float, int]], at: float) -> int:
    """Return the samples that a worker had at a time."""
    return max((samples for time_sec, samples in counts if time_sec <= at), default=0)


def plot(curves: dict[str, list[tuple[float, float, float]]], file: Path) -> None:
    """Draw the curves."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    for column, (axis, what) in enumerate(zip(axes, ("seconds", "samples of all workers"), strict=True)):
        for name, curve in curves.items():
            axis.plot([point[column] for point in curve], [point[2] for point in curve], label=name)
        axis.set_xlabel(what)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss on validation data")
    axes[1].legend()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """Train with each strategy, print the last losses, and draw the plot; or be one rank."""
    if len(sys.argv) == 4:
        _rank(*sys.argv[1:])
        return
    curves: dict[str, Any] = {}
    for name, strategy in STRATEGIES.items():
        curves[name] = under_unidist("benchmarks.learning_curves", WORKERS, SECONDS, strategy)
        at, samples, loss = curves[name][-1]
        print(f"{name}: loss {loss:.3f} after {at:.0f} s and {samples:.0f} samples", flush=True)
    shared = min(curve[-1][1] for curve in curves.values())
    for name, curve in curves.items():
        loss = next(loss for _, samples, loss in reversed(curve) if samples <= shared)
        print(f"{name}: loss {loss:.3f} after {shared:.0f} samples")
    plot(curves, Path(sys.argv[1]))


def _rank(result: str, seconds: str, strategy: str) -> None:
    import unidist.torch as ud

    ud.init()
    found = train(strategy, float(seconds))
    if ud.rank() == 0:
        Path(result).write_text(json.dumps(found), encoding="utf-8")
    ud.shutdown()


if __name__ == "__main__":
    main()
