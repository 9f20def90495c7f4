"""What the facade imports, and what it offers beside Horovod's TensorFlow module."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorflow_ranks import ENVIRONMENT

import unidist.tensorflow as ud


def test_the_core_imports_no_tensorflow() -> None:
    modules = "unidist, unidist.horovod_api.lifecycle, unidist.horovod_api.scope, unidist.horovod_api.reduce_ops"
    code = f"import sys, {modules}; sys.exit('tensorflow' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 0


FACADES = [
    "unidist.tensorflow", "unidist.tensorflow.elastic", "unidist.tensorflow.keras",
    "unidist.tensorflow.keras.callbacks", "unidist.tensorflow.keras.elastic",
    "unidist.keras", "unidist.keras.callbacks", "unidist.keras.elastic",
]  # fmt: skip


@pytest.mark.parametrize("facade", FACADES)
def test_a_facade_has_the_names_that_it_lists_and_makes_none_itself(facade: str) -> None:
    module = importlib.import_module(facade)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    own = {name for name, item in vars(module).items() if getattr(item, "__module__", None) == facade}
    assert own == set()


def test_signatures_are_horovods() -> None:
    """Positional use of Horovod's arguments must keep its meaning: same names, same order, same simple defaults."""
    horovod = pytest.importorskip("horovod.tensorflow", exc_type=ImportError)
    operations = [
        "allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "broadcast_", "alltoall",
        "reducescatter", "grouped_reducescatter", "join", "broadcast_object", "broadcast_object_fn",
        "allgather_object", "broadcast_variables", "broadcast_global_variables", "rank_op", "size_op",
        "local_rank_op", "local_size_op", "process_set_included_op",
    ]  # fmt: skip
    for name in operations:
        theirs = inspect.signature(getattr(horovod, name)).parameters
        ours = inspect.signature(getattr(ud, name)).parameters
        assert list(ours)[: len(theirs)] == list(theirs), name
        for parameter, mine in zip(theirs.values(), ours.values(), strict=False):
            if parameter.default is inspect.Parameter.empty or isinstance(parameter.default, str | int | float):
                assert parameter.default == mine.default, (name, parameter.name)
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert int(getattr(ud, name)) == int(getattr(horovod, name))
    for name in ("TensorFlowState", "TensorFlowKerasState"):
        theirs_of = list(inspect.signature(getattr(horovod.elastic, name)).parameters)[:-1]
        assert list(inspect.signature(getattr(ud.elastic, name)).parameters)[:-1] == theirs_of


def test_entry_module_is_light() -> None:
    source = inspect.getsource(importlib.import_module("unidist_tensorflow.plugin"))
    assert "import tensorflow" not in source


LOOP = """
import tensorflow as tf
import unidist.tensorflow as hvd

hvd.init()
weight, rows = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([4, 2]))


@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * x) + tf.reduce_sum(tf.nn.embedding_lookup(rows, [0, 1]))
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, [weight, rows])
    weight.assign_sub(gradients[0])
    hvd.broadcast_variables([weight, rows], root_rank=0)
    return hvd.allreduce(loss), hvd.allgather(weight)


step(tf.ones([2]))
"""


def test_a_loop_in_a_graph_makes_no_warnings_of_autograph(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"  # AutoGraph needs the sources of what it converts
    script.write_text(LOOP)
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "AutoGraph" not in done.stderr
