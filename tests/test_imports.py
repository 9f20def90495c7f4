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
import keras, numpy, sys, tensorflow, unidist.tensorflow, unidist.tensorflow.keras, unidist.keras as ud
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


def imported_by(code: str) -> set[str]:
    """Return those of `FRAMEWORKS` that a new process has loaded after this code."""
    probe = f"{code}\nimport sys; print('loaded:', *({FRAMEWORKS!r} & sys.modules.keys()))"
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", probe], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(done.stdout.rpartition("loaded:")[2].split())


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


def test_what_is_imported_is_seen() -> None:
    """Without this the tests above might pass whatever is loaded."""
    assert imported_by("import numpy") == {"numpy"}
