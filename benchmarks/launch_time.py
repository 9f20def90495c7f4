"""How long it takes to start two ranks that print their number: `unidist launch` beside torchrun."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SCRIPT = "import os; print('rank', os.environ['RANK'])\n"


def measure(repetitions: int) -> dict[str, float]:
    """Return median wall times in seconds, of whole processes that take turns."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "print_rank.py"
        script.write_text(_SCRIPT)
        commands = {
            "unidist launch": [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", str(script)],
            "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)],
            "unidist launch --help": [sys.executable, "-m", "unidist_launch", "launch", "--help"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for repetition in range(-1, repetitions):
            for name, command in commands.items():
                start = time.perf_counter()
                subprocess.run(command, check=True, capture_output=True, timeout=120)
                if repetition >= 0:
                    seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
