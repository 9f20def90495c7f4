"""A plugin of somebody else: found by its entry point, listed, switched off, and used from the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from unidist_command import Command

from unidist.runtime.plugin_manager import PluginManager

ROOT = Path(__file__).resolve().parents[2]
ORIGIN = "'sample' (unidist-sample-plugin)"


def unidist(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unidist_launch", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_it_is_found_through_its_entry_point(manager: PluginManager) -> None:
    info = manager.plugins["sample"]
    assert (info.distribution, info.version, info.problems) == ("unidist-sample-plugin", "1.0.0", [])


def test_what_it_registers_is_known_as_its_own(manager: PluginManager) -> None:
    assert manager.engines.origin_of("sample-sockets") == ORIGIN
    assert manager.strategies.origin_of("sample-compress") == ORIGIN


def test_it_is_listed_like_any_other(manager: PluginManager) -> None:
    listed = json.loads(unidist("plugins", "--json").stdout)["plugins"]
    (sample,) = [plugin for plugin in listed if plugin["name"] == "sample"]
    assert sample["distribution"] == "unidist-sample-plugin"
    assert sample["engines"] == ["sample-sockets"]
    assert sorted(sample["strategies"]) == ["lars", "noise", "sample-board", "sample-compress"]
    assert sample["compressors"] == ["sample-signs"]
    assert sample["schedules"] == ["sample-eager"]
    assert sample["problems"] == []


def test_finding_it_imports_neither_a_framework_nor_numpy(manager: PluginManager) -> None:
    code = """
import sys
from unidist.runtime.plugin_manager import PluginManager
manager = PluginManager().load()
assert "sample-sockets" in manager.engines and "sample-compress" in manager.strategies
print(*sorted({"numpy", "torch", "unidist_sample.sockets"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True)
    assert done.stdout.split() == []


def test_switched_off_its_names_are_unknown(manager: PluginManager) -> None:
    done = unidist("launch", "-np", "2", "-p", "no:sample", "--engine", "sample-sockets", "true")
    assert done.returncode == 2
    assert "unknown engine 'sample-sockets'" in done.stderr
    assert "shm" in done.stderr


@pytest.mark.parametrize("line", ["sample-compress=float8", "sample-compress:rounding=up", "sample-compress,data"])
def test_a_line_that_does_not_fit_is_refused_before_anything_starts(
    command: Command, manager: PluginManager, line: str
) -> None:
    done = command.run_here("launch", "-np", "2", "--strategy", line, "true")
    assert done.returncode == 2
    assert "sample-compress" in done.stderr


@pytest.mark.parallel
@pytest.mark.slow
def test_its_engine_and_its_strategy_train_the_digits(manager: PluginManager) -> None:
    done = unidist(
        "launch", "-np", "2", "--engine", "sample-sockets", "--strategy", "sample-compress=bfloat16,accumulate=2",
        "examples/torch/digits.py", "--epochs", "6", "--batch-size", "16",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.search(r"after 6 epochs on 2 process\(es\): ([\d.]+)%", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 90
