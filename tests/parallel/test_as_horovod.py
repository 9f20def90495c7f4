"""`unidist launch --as-horovod`: scripts of Horovod, unchanged."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from unidist_command import Command

from unidist.horovod_imports import PATH_ENTRY

pytestmark = pytest.mark.parallel

WHERE = """
import horovod.common.exceptions as found
print(found.HorovodInternalError.__module__)
"""
TORCH = """
import sys
import torch
import horovod.torch as hvd
from horovod.torch.mpi_ops import synchronize
from unidist.runtime import context

class Names(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        import horovod.torch.compression as compression
        return compression.Compression.__module__

if __name__ == "__main__":
    hvd.init()
    engine = context.current().engine.spec.name
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"} if hvd.rank() else {}
    names = torch.utils.data.DataLoader(Names(), **spawned)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, hvd.rank() + 1.0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters()
    )
    model(torch.full((1, 1), float(hvd.rank()))).sum().backward()
    optimizer.step()
    total = synchronize(hvd.allreduce_async(torch.tensor(2.0), op=hvd.Sum))
    name = next(iter(names))[0] if engine == "shm" else ""
    print(name, float(total), model.weight.item(), engine, "horovod.torch.mpi_lib_v2" in sys.modules)
"""
TENSORFLOW = """
import tensorflow as tf
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
from horovod.tensorflow.keras.callbacks import MetricAverageCallback
hvd.init()
variable = tf.Variable(1.0)
with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
    loss = variable * float(hvd.rank())
(gradient,) = tape.gradient(loss, [variable])
from unidist.runtime import context
engine = context.current().engine.spec.name
print(float(gradient), hvd_keras.rank() == hvd.rank(), MetricAverageCallback.__module__, engine)
"""


def lines(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Return what the ranks have printed, without their numbers."""
    return {line.partition("] ")[2] for line in done.stdout.splitlines()}


def test_ranks_get_unidist_by_option_file_and_variable(command: Command) -> None:
    script = command.script(WHERE)
    (command.folder / "job.yaml").write_text("as-horovod: true\n")
    for options, env in (
        (("--as-horovod",), None),
        (("--config", "job.yaml"), None),
        ((), {"UNIDIST_AS_HOROVOD": "1"}),
    ):
        done = command.run("launch", "-np", "2", *options, script, env=env)
        assert lines(done) == {"unidist.errors"}, done.stderr


@pytest.mark.parametrize("switched_off", [("--no-as-horovod",), ("--env", "UNIDIST_AS_HOROVOD=0")])
def test_it_can_be_switched_off(command: Command, switched_off: tuple[str, ...]) -> None:
    script = command.script("print('PYTHONPATH' in os.environ and os.environ['PYTHONPATH'])")
    done = command.run("launch", "-np", "1", *switched_off, script, env={"UNIDIST_AS_HOROVOD": "1"})
    assert PATH_ENTRY not in done.stdout, done.stderr


def test_a_path_of_the_users_stays_behind_it(command: Command) -> None:
    script = command.script("import json; print(json.dumps(os.environ['PYTHONPATH']))")
    done = command.run("launch", "-q", "-np", "1", "--as-horovod", "--env", "PYTHONPATH=/mine:/yours", script)
    assert json.loads(done.stdout.partition("] ")[2]) == f"{PATH_ENTRY}:/mine:/yours", done.stderr


def test_a_script_for_pytorch_runs_with_its_workers(command: Command) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    done = command.run("launch", "-np", "2", "--engine", "shm", "--as-horovod", command.script(TORCH))
    assert lines(done) == {"unidist_torch.operations.compression 4.0 0.5 shm False"}, done.stderr


def test_for_other_launchers_the_folder_on_the_path_is_enough(command: Command) -> None:
    path = os.pathsep.join([PATH_ENTRY, *filter(None, sys.path)])
    words = [sys.executable, command.script(WHERE)]
    with command.start_words(words, env={**os.environ, "PYTHONPATH": path}) as process:
        out, err = process.communicate(timeout=120)
    assert out == "unidist.errors\n", err


@pytest.mark.parametrize("binding", ["torch", "tensorflow"])
def test_the_engine_horovod_goes_on_reaching_the_real_one(command: Command, binding: str) -> None:
    if importlib.util.find_spec("horovod") is None or importlib.util.find_spec(binding) is None:
        pytest.skip(f"Horovod or {binding} is not installed")
    script = command.script(TORCH if binding == "torch" else TENSORFLOW)
    done = command.run(
        *("launch", "-np", "2", "--as-horovod", "--engine", "horovod", script),
        env={"UNIDIST_HOROVOD_BINDING": binding, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 0, done.stderr
    expected = {
        "torch": " 4.0 0.5 horovod False",
        "tensorflow": "0.5 True unidist_tensorflow.keras.callbacks horovod",
    }
    assert lines(done) == {expected[binding]}


def test_it_works_where_horovod_is_not_installed(command: Command, tmp_path: Path) -> None:
    """The real one is hidden by a finder that says there is none."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery, sys\n"
        "found = importlib.machinery.PathFinder.find_spec\n"
        "class NotInstalled(importlib.machinery.PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        spec = found(name, path, target)\n"
        "        return None if spec and 'site-packages/horovod' in str(spec.origin) else spec\n"
        "sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = NotInstalled\n"
    )
    script = command.script("import horovod")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    if importlib.util.find_spec("horovod") is not None:
        without = command.run("launch", "-np", "1", script, env={"PYTHONPATH": path})
        assert "No module named 'horovod'" in without.stderr
    script = command.script(WHERE)
    done = command.run("launch", "-np", "1", "--as-horovod", script, env={"PYTHONPATH": path})
    assert done.stdout == "[0] unidist.errors\n", done.stderr
