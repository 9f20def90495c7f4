"""The engine under Horovod's own starter gives what it gives under `unidist launch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

_SCRIPT = """
import json
import sys
import torch
import unidist.torch as ud

ud.init()
world = ud.world()
torch.manual_seed(5 + ud.rank())
model = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = ud.distribute(model, optimizer)
losses = []
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(ud.allreduce(loss.detach(), name="loss").item())
total = ud.allreduce(torch.full((3,), float(ud.rank() + 1)), op=ud.Sum, name="total")
if ud.rank() == 0:
    digest = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    result = {"engine": world.description, "size": ud.size(), "total": total.tolist(), "losses": losses, "end": digest}
    with open(sys.argv[1], "w") as file:
        json.dump(result, file)
ud.shutdown()
"""
_HOROVODRUN = "from horovod.runner.launch import run_commandline; run_commandline()"


def test_horovodrun_and_unidist_launch_train_alike(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    starters = {
        "horovodrun": [sys.executable, "-c", _HOROVODRUN, "-np", "2", "--gloo", sys.executable],
        "unidist": [sys.executable, "-m", "unidist_launch", "launch", "-np", "2"],
    }
    results = {name: _run(command, script, tmp_path / f"{name}.json") for name, command in starters.items()}
    assert results["horovodrun"] == results["unidist"]
    assert results["unidist"]["engine"] == "horovod, ranks 0, 1"
    assert results["unidist"]["total"] == [3, 3, 3]
    assert len(set(results["unidist"]["losses"])) == 5


def _run(command: list[str], script: Path, output: Path) -> Any:
    env = {**os.environ, "UNIDIST_ENGINE": "horovod", "UNIDIST_TIMEOUT_SEC": "30", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script), str(output)], env=env, cwd=script.parent, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return json.loads(output.read_text())
