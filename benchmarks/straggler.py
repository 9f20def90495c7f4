"""Three workers, one of them at half speed: how much the others lose. Run by `python -m benchmarks` on three ranks.

Computing is a sleep, so that workers do not compete for the cores. Each worker makes steps for a while with all at full
speed, and again with the last one at half speed.

    python -m benchmarks.straggler RESULT STEPS STRATEGY
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

STEP_SEC = 0.03
WORKERS = 3


def steps_per_second(strategy: str, steps: int) -> dict[str, list[float]]:
    """Return the rates of all ranks, "equal" and with the last one "slow", on every rank."""
    import torch

    import unidist.torch as ud

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = ud.distribute(model, optimizer, strategy=strategy)
    inputs = torch.randn(8, 64)
    found = {}
    for phase in ("equal", "slow"):
        pause = STEP_SEC * (2 if phase == "slow" and ud.rank() == ud.size() - 1 else 1)

        def step(pause: float = pause) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            time.sleep(pause)
            optimizer.step()

        step()
        ud.barrier()
        # The fast ones make all steps while the slow one is there.
        own = steps // 2 if pause > STEP_SEC and strategy.startswith("parameter_server=async") else steps
        begun = time.monotonic()
        for _ in range(own):
            step()
        rate = own / (time.monotonic() - begun)
        found[phase] = [float(each) for each in ud.allgather(torch.tensor([rate], dtype=torch.float64))]
    return found


def under_tensorflow(seconds: float) -> dict[str, float]:
    """Return the steps per second of all workers under TensorFlow's ParameterServerStrategy, "equal" and "slow"."""
    import os
    import subprocess
    import tempfile
    from pathlib import Path

    from benchmarks.jobs import ROOT, free_ports

    found = {}
    for phase in ("equal", "slow"):
        ports = free_ports(2 + WORKERS)
        cluster = {
            "chief": [f"127.0.0.1:{ports[0]}"],
            "ps": [f"127.0.0.1:{ports[1]}"],
            "worker": [f"127.0.0.1:{port}" for port in ports[2:]],
        }
        running = []
        with tempfile.TemporaryDirectory() as folder:
            try:
                for role, index in [("ps", 0), *(("worker", number) for number in range(WORKERS)), ("chief", 0)]:
                    own = Path(folder) / f"{role}{index}"
                    own.mkdir()
                    pause = STEP_SEC * (2 if phase == "slow" and index == WORKERS - 1 else 1)
                    (own / "pause").write_text(str(round(1e6 * pause)))
                    task = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
                    env = {**os.environ, "TF_CONFIG": task, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
                    words = [sys.executable, "-m", "benchmarks.straggler_tensorflow", str(seconds)]
                    running.append(subprocess.Popen(words, cwd=own, env=env, stdout=subprocess.PIPE, text=True))
                out, _ = running[-1].communicate(timeout=300)
                found[phase] = float(out.split()[-1])
            finally:
                for process in running:
                    process.kill()
                    process.communicate()
    return found


def main(output: str, steps: int, strategy: str) -> None:
    """Measure, and let rank 0 write what the fast ranks keep of their rate, and all of theirs."""
    import unidist.torch as ud

    ud.init()
    rates = steps_per_second(strategy, steps)
    if ud.rank() == 0:
        fast = {phase: statistics.mean(each[:-1]) for phase, each in rates.items()}
        with open(output, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "fast, equal": fast["equal"],
                    "fast, slow": fast["slow"],
                    "all, equal": sum(rates["equal"]),
                    "all, slow": sum(rates["slow"]),
                },
                file,
            )
    ud.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
