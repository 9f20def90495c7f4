"""Trains a text model alone and with several strategies on the same batches, and lays the loss curves over each other.

    python examples/compare_strategies.py --out out/torch.png
    python examples/compare_strategies.py --framework keras --out out/keras.png
    python examples/compare_strategies.py --num-proc 2 --strategy zero=3 --strategy tensor=2 --steps 80

Each run is `unidist launch` of torch/char_gpt.py or keras/text_transformer.py. All see the same windows of text in the
same order, however many processes share a batch, so the curves are the same but for rounding. Options that this script
does not know go to the training script (`--layers 2`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = {"torch": "torch/char_gpt.py", "keras": "keras/text_transformer.py"}
STRATEGIES = ("pipeline=2", "tensor=2", "pipeline=2,tensor=2")
ALONE = "one process"


def train(script: Path, num_proc: int | None, strategy: str, arguments: list[str]) -> list[float]:
    """Run a script, under `unidist launch` unless `num_proc` is None; returns the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "losses.json"
        command = [sys.executable]
        if num_proc is not None:
            command += ["-m", "unidist_launch", "launch", "-np", str(num_proc), "--strategy", strategy]
        command += [str(script), "--loss-log", str(log), *arguments]
        print("+", *command[1:], flush=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        losses: list[float] = json.loads(log.read_text(encoding="utf-8"))["loss"]
        return losses


def differences(losses: list[float], reference: list[float]) -> list[float]:
    """Return how far each step's loss is from the reference's."""
    return [abs(one - other) for one, other in zip(losses, reference, strict=True)]


def draw(file: Path, curves: dict[str, list[float]], title: str) -> None:
    """Write a picture: the curves over each other, and how far each is from the one of one process."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 8), layout="constrained", sharex=True)
    for place, (name, losses) in enumerate(curves.items()):
        steps = range(1, len(losses) + 1)
        dashes = (place * 3, (3, 3 * (len(curves) - 2))) if place else (0, ())  # so that equal curves can all be seen
        above.plot(steps, losses, label=name, color=f"C{place}", linestyle=dashes, linewidth=2 if place else 1)
        if place:
            below.plot(steps, differences(losses, curves[ALONE]), label=name, color=f"C{place}", linewidth=1)
    above.set_title(title)
    above.set_ylabel("loss")
    below.set_ylabel(f"difference from {ALONE}")
    below.set_yscale("log")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(alpha=0.3)
        axis.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", choices=SCRIPTS, default="torch")
    parser.add_argument("--num-proc", type=int, default=4, help="processes of every run but the first (default: 4)")
    parser.add_argument(
        "--strategy", action="append", metavar="LINE", help=f"may be repeated (default: {'; '.join(STRATEGIES)})"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--global-batch-size", type=int, default=16, help="windows per step, of all processes together")
    parser.add_argument("--out", type=Path, default=Path("strategies.png"), metavar="FILE", help="the picture")
    parser.add_argument("--tolerance", type=float, help="fail if a loss is further than that from one process's")
    args, more = parser.parse_known_args()

    script = Path(__file__).parent / SCRIPTS[args.framework]
    arguments = ["--steps", str(args.steps), "--global-batch-size", str(args.global_batch_size), "--sample", "0", *more]
    curves = {ALONE: train(script, None, "", arguments)}
    for strategy in args.strategy or STRATEGIES:
        curves[strategy] = train(script, args.num_proc, strategy, arguments)
    draw(args.out, curves, f"{script.name}, {args.num_proc} processes")

    largest = 0.0
    for name, losses in curves.items():
        found = differences(losses, curves[ALONE])
        largest = max(largest, *found)
        step = found.index(max(found)) + 1
        print(f"{name:24} last loss {losses[-1]:.4f}, largest difference {max(found):.2e} (step {step})")
    print(args.out)
    if args.tolerance is not None and not largest <= args.tolerance:
        sys.exit(f"the curves differ by {largest:.2e}, more than {args.tolerance}")


if __name__ == "__main__":
    main()
