"""Plugins can be deleted, each and all: the modules that scripts import, and what trains, work without them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = sorted(path.name for path in (Path(__file__).parents[1] / "plugins").glob("unidist_*"))

PROGRAM = """
import os, sys
import {framework}

class Hide:
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(f"No module named {{name!r}}: it is hidden", name=name)

plugins = sys.argv[1:]
for name in [each for each in sys.modules if each.partition(".")[0] in plugins]:
    del sys.modules[name]  # of a library that loads its extensions by itself

def loaded():
    return {{name for name in sys.modules if name.partition(".")[0] in plugins}}

def train():
    from unidist.runtime.plugin_manager import PluginManager
    PluginManager().load()
    registered = loaded()
    import {facade} as ud
    ud.init()
    {train}
    assert set(dir(ud)) >= set(ud.__all__)
    return {{name.partition(".")[0] for name in loaded() - registered}}

def without(hidden):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        sys.meta_path.insert(0, Hide(hidden))
        os.write(write, " ".join(sorted(train())).encode())
        os._exit(0)
    os.close(write)
    found = os.read(read, 10_000).decode().split()
    if os.waitpid(child, 0)[1]:
        print("needs one of", *hidden)
    return found

without(plugins)
for plugin in without([]):  # used, and not registered only
    without([plugin])
"""
TRAIN = {
    "torch": "m = torch.nn.Linear(2, 1); m, o = ud.distribute(m, torch.optim.SGD(m.parameters(), 0.1)); "
    "m(torch.ones(1, 2)).sum().backward(); o.step()",
    "jax": "ud.allreduce(jax.numpy.ones(2))",
    "tensorflow": "ud.allreduce(tensorflow.ones(2))",
}


@pytest.mark.parametrize("framework", TRAIN)
def test_it_works_without_all_plugins_and_without_each_that_it_uses(framework: str) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    program = PROGRAM.format(framework=framework, facade=f"unidist.{framework}", train=TRAIN[framework])
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", program, *PLUGINS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr[-3000:]


def test_a_name_of_a_plugin_is_gone_with_it() -> None:
    pytest.importorskip("torch")
    program = "import unidist.torch as ud; assert 'data_service' not in dir(ud); ud.data_service"
    environment = {**os.environ, "UNIDIST_DISABLE_PLUGINS": "data_service"}
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "AttributeError: module 'unidist.torch' has no attribute 'data_service'" in done.stderr
