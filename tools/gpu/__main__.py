"""Run the sections within a budget: python -m tools.gpu [--device cpu] [--budget SECONDS] [--only NAME]...

Prints a line for each section and writes it, with its log, to the folder of results as soon as it is known. Exits with
1 if a section failed or was not reached. `NCCL_SO` names a library of NCCL 2.30 or newer to load instead of PyTorch's
own, so that several ranks share one GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tools.gpu.sections import Machine, Section, sections

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [str(ROOT), *(str(ROOT / folder) for folder in ("adapters", "plugins", "launch"))]
_LEAST_SEC = 15.0
"""A section is not begun with less time left."""


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["gpu", "cpu"]), default="gpu", help="cpu: a rehearsal.", show_default=True)
@click.option("--budget", type=float, default=540.0, help="Seconds for all sections.", show_default=True)
@click.option("--only", multiple=True, help="Sections whose names begin so.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/gpu"), help="Results.", show_default=True)
def main(device: str, budget: float, only: Sequence[str], out: Path) -> None:
    """Run them."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + budget
    wanted = [each for each in sections(look(device), out) if not only or each.name.startswith(tuple(only))]
    if not wanted:
        raise click.UsageError(f"no section begins with {' or '.join(only)}")
    results: list[dict[str, Any]] = []
    for section in wanted:
        left = deadline - time.monotonic()
        if section.obstacle:
            result = {"name": section.name, "state": "left out", "seconds": 0.0, "why": section.obstacle}
        elif left < _LEAST_SEC:
            result = {"name": section.name, "state": "not reached", "seconds": 0.0}
        else:
            result = run(section, min(section.limit_sec, left), out)
        results.append(result)
        (out / "summary.json").write_text(json.dumps(results, indent=1))
        click.echo(f"{result['name']:<24}{result['state']:<12}{result['seconds']:7.1f} s  {result.get('why', '')}")
    bad = [result["name"] for result in results if result["state"] not in ("passed", "left out")]
    click.echo(f"{len(results) - len(bad)} of {len(results)} passed or left out; results and logs are in {out}")
    if bad:
        click.echo(f"failed or not reached: {', '.join(bad)}")
        sys.exit(1)


def look(device: str) -> Machine:
    """Return what this machine has."""
    import torch.cuda.nccl

    gpus = torch.cuda.device_count() if device == "gpu" else 0
    if device == "gpu" and not gpus:
        found = f"torch {torch.__version__} of {sys.executable} sees no GPU"
        raise click.ClickException(f"{found}. A rehearsal on the CPU: --device cpu (make gpu DEVICE=cpu)")
    preload = os.environ.get("NCCL_SO", "")
    may_share = bool(preload) or (gpus > 0 and torch.cuda.nccl.version() >= (2, 30))
    return Machine(gpus, may_share, importlib.util.find_spec("jax") is not None, preload)


def run(section: Section, limit_sec: float, out: Path) -> dict[str, Any]:
    """Run a section, and return its state: "passed", "failed" or "timed out"."""
    file = out / f"{section.name}.json"
    file.unlink(missing_ok=True)
    paths = [*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "2", **section.variables}
    begin = time.monotonic()
    with open(out / f"{section.name}.log", "w") as log:
        process = subprocess.Popen(
            section.command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_sec)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)  # of the section's own session
            process.wait()
    result = {"name": section.name, "seconds": round(time.monotonic() - begin, 1)}
    checked: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    wrong = [name for name, each in checked.items() if isinstance(each, dict) and not each.get("ok", True)]
    if code is None:
        return {**result, "state": "timed out", "why": f"after {limit_sec:.0f} s", "found": checked}
    if code or wrong:
        why = ", ".join(wrong) or f"exit code {code}, see {section.name}.log"
        return {**result, "state": "failed", "why": why, "found": checked}
    return {**result, "state": "passed", "found": checked}


if __name__ == "__main__":
    main()
