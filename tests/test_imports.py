"""What an import brings along: the core and the launcher nothing heavy, TensorFlow's facades never PyTorch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

FRAMEWORKS = {"numpy", "torch", "tensorflow", "keras", "tf_keras", "jax", "mpi4py", "horovod"}
needs_tensorflow = pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is missing")

ONE_PROCESS_TRAINS = """
import keras, numpy, sys, tensorflow
before = len(sys.modules)
import unidist.tensorflow, unidist.tensorflow.keras, unidist.keras as ud
assert len(sys.modules) - before <= 12
ud.init()
unidist.tensorflow.allreduce(tensorflow.constant(1.0))
model, optimizer = ud.distribute(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), keras.optimizers.Adam())
model.compile(optimizer, "mse", jit_compile=False)
model.fit(numpy.ones((4, 3)), numpy.ones(4), verbose=0)
ud.shutdown()
described = {"unidist_torch.plugin", "unidist_torch.file_names"}  # what it registers, and a kind of plugin
assert not [name for name in sys.modules if name.startswith("unidist_torch.") and name not in described]
assert "torch" not in sys.modules
"""


FIRST_STEP = """
import sys, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
step()  # PyTorch imports more in its first
before = set(sys.modules)
import unidist.torch as ud
imported = set(sys.modules) - before
ud.init()
model, optimizer = ud.distribute(model, optimizer)
step()
print(len(imported), *(name for name in sys.modules.keys() - before if name.startswith("unidist")))
"""
NOT_FOR_A_FIRST_STEP = (
    "unidist.checkpoint.job", "unidist.control.messages", "unidist.elastic.state", "unidist_torch.elastic.state",
    "unidist_torch.loading", "unidist_torch.training.train_step",
)  # fmt: skip


def printed_by(code: str) -> list[str]:
    """Return the words that a new process prints."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def imported_by(code: str) -> set[str]:
    """Return those of `FRAMEWORKS` that a new process has loaded after this code."""
    printed = printed_by(f"{code}\nimport sys; print('loaded:', *({FRAMEWORKS!r} & sys.modules.keys()))")
    return set(printed[printed.index("loaded:") + 1 :])


@pytest.mark.parametrize(
    "code",
    [
        "import unidist",
        "from unidist.runtime.plugin_manager import PluginManager as M; m = M(); m.load(); list(m.frameworks)",
        "import unidist_launch.cli",
    ],
)
def test_the_core_and_the_command_import_no_framework(code: str) -> None:
    assert imported_by(code) == set()


@needs_tensorflow
def test_training_with_keras_never_imports_torch() -> None:
    imported = imported_by(ONE_PROCESS_TRAINS)
    assert {"numpy", "tensorflow", "keras"} <= imported
    assert imported.isdisjoint({"torch", "horovod"})


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is missing")
def test_a_script_imports_what_it_uses() -> None:
    """Each module takes a third of a millisecond of every start. Counted, because times of imports are noise."""
    at_import, *at_first_step = printed_by(FIRST_STEP)
    assert int(at_import) <= 5
    assert len(at_first_step) <= 300
    assert set(at_first_step).isdisjoint(NOT_FOR_A_FIRST_STEP)
    assert {"unidist.optim.update", "unidist_torch.optimizer.binding"} <= set(at_first_step)  # they are counted


def test_what_is_imported_is_seen() -> None:
    """Without this the tests above might pass whatever is loaded."""
    assert imported_by("import numpy") == {"numpy"}
