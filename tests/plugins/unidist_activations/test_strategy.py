"""The strategy's options, and what it says of memory; no framework."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from unidist.cost_model.figures import Workload
from unidist.errors import ConfigurationError, UsageError
from unidist.jobs.preflight import check
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings
from unidist.strategy.plan import build, make_plan
from unidist_activations._files import FileMemory
from unidist_activations.strategy import Activations
from unidist_planner.memory.comparison import compare
from unidist_planner.memory.transformer import Transformer


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager().load()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("activations=recompute", Activations("recompute")),
        ("activations=recompute:blocks=a.*+b", Activations("recompute", blocks="a.*+b")),
        ("activations=offload:path=/scratch", Activations("offload", path="/scratch")),
    ],
)
def test_a_line_becomes_the_strategy(manager: PluginManager, line: str, expected: Activations) -> None:
    assert build(line, manager.strategies) == (expected,)
    assert expected in make_plan([expected], 2, manager.strategies).strategies


def test_patterns_are_separated_by_plus() -> None:
    assert Activations("recompute", blocks="a.* + b").patterns == ("a.*", "b")
    assert Activations("recompute").patterns == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("activations", "needs a value"),
        ("activations=swap", "unknown value for activations: 'swap'"),
        ("activations=recompute:path=/tmp", "only activations=offload keeps anything in files"),
        ("activations=recompute:blocks=a++b", "has an empty pattern"),
        ("activations=recompute:block=a", "Did you mean 'blocks'?"),
    ],
)
def test_bad_options_are_errors_before_anything_starts(manager: PluginManager, line: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check(Settings(strategy=line), 2, manager)
    assert message in str(caught.value)


def test_an_unknown_policy_of_an_object_is_an_error(manager: PluginManager) -> None:
    with pytest.raises(ConfigurationError, match="unknown value for activations: 'swap'"):
        make_plan([Activations(cast(Any, "swap"))], 1, manager.strategies)


def test_what_is_no_model_is_an_error() -> None:
    context = SimpleNamespace(topology=SimpleNamespace(rank=0), plugins=PluginManager().load())
    with pytest.raises(UsageError, match=r"builtins\.list is no model of a framework .* it knows: .*tensorflow, torch"):
        Activations("recompute").partition([], cast(Any, context))


def test_the_estimate_keeps_inputs_and_one_block(manager: PluginManager) -> None:
    model = Transformer(layers=12, hidden=768, vocabulary=50257, sequence=1024)
    workload = Workload(model.figures(), precision="bf16", activations=model)
    candidates = compare(workload, "identity", num_ranks=1, registry=manager.strategies)
    found = {item.line: item.estimate for item in candidates}
    kept = model.bytes(2)
    assert found["identity"].bytes_of("activations") == kept.blocks + kept.outside
    recomputed = found["activations=recompute,identity"].bytes_of("activations")
    assert recomputed == kept.block_inputs + kept.largest_block + kept.outside


def test_file_memory_keeps_what_is_written_and_leaves_nothing(tmp_path: Path) -> None:
    memory = FileMemory(str(tmp_path), rank=0)
    piece = memory.allocate(3 * mmap.PAGESIZE + 1)
    piece[:5] = b"hello"
    FileMemory.let_go(piece)
    assert piece[:6] == b"hello\0"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_or_full_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"missing: .* activations of rank 3 .*: No such file"):
        FileMemory(str(tmp_path / "missing"), rank=3)
    memory = FileMemory(str(tmp_path), rank=0)
    with pytest.raises(ConfigurationError, match=r"File too large|No space left"):
        memory.allocate(1 << 60)


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a file system in memory")
def test_a_folder_in_memory_gets_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    FileMemory("/dev/shm", rank=0)
    assert "that is memory (tmpfs), so nothing is saved" in caplog.text


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    memory = FileMemory(str(tmp_path), rank=0)
    before = len(os.listdir("/proc/self/fd"))
    piece = memory.allocate(mmap.PAGESIZE)
    del piece
    assert len(os.listdir("/proc/self/fd")) == before
