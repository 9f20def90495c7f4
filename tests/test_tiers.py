"""Which tests `make test` runs: by what was measured, and one end-to-end test of everything."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from durations import Durations, rounded, without_group
from tiers import COLLECTED, DURATIONS, end_to_end, one_of_each

from unidist.engine import EngineSpec
from unidist.framework import FrameworkSpec
from unidist.launcher import LauncherSpec
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import StrategySpec
from unidist.strategy.bindings import BindingSpec

ROOT = Path(__file__).parents[1]


def measured(times: dict[str, float], before: Durations | None = None) -> Durations:
    return (before or Durations()).updated(times, times)


def test_a_test_that_was_never_measured_is_not_quick() -> None:
    durations = measured({"tests/test_a.py::test_x": 0.1})
    assert durations.seconds(["tests/test_a.py::test_x"]) == {"tests/test_a.py::test_x": 0}
    for other in ("tests/test_a.py::test_new", "tests/test_new.py::test_x", "tests/test_a.py::TestIt::test_x"):
        assert durations.seconds([other]) == {other: None}


def test_a_function_with_a_new_case_was_never_measured() -> None:
    cases = [f"tests/test_a.py::test_x[{case}]" for case in "abc"]
    durations = measured(dict.fromkeys(cases, 0.1))
    assert set(durations.seconds(cases).values()) == {0}
    assert set(durations.seconds([*cases, "tests/test_a.py::test_x[new]"]).values()) == {None}


def test_slow_tests_have_steps_for_seconds() -> None:
    times = {"tests/test_a.py::test_x": 1.4, "tests/test_a.py::test_y": 30.0}
    assert list(measured(times).seconds(times).values()) == [2, 50]


def test_a_case_that_differs_from_the_others_has_its_own_time() -> None:
    times = {f"tests/test_a.py::test_x[{case}]": 0.1 for case in "abc"} | {"tests/test_a.py::test_x[slow]": 3.0}
    assert list(measured(times).seconds(times).values()) == [0, 0, 0, 5]


def test_a_sample_has_one_case_of_each_and_in_turn_all_of_them() -> None:
    tests = ["a.py::test_x[1]", "a.py::test_x[2]", "a.py::test_y"]
    assert [sorted(one_of_each(tests, number)) for number in (7, 8)] == [[tests[1], tests[2]], [tests[0], tests[2]]]


def test_noise_changes_nothing() -> None:
    times = {"tests/test_a.py::test_x": 1.4, "tests/test_a.py::test_y": 0.2, "tests/test_a.py::test_z": 8.0}
    before = measured(times)
    noisy = {"tests/test_a.py::test_x": 0.8, "tests/test_a.py::test_y": 0.3, "tests/test_a.py::test_z": 13.0}
    after = measured(noisy, before)
    assert list(after.seconds(times).values()) == list(before.seconds(times).values()) == [2, 0, 10]


def test_a_slower_machine_changes_nothing() -> None:
    times = {f"tests/test_a.py::test_{number}": 0.1 * 1.1**number for number in range(60)}
    before = measured(times)
    after = measured({test: 3 * seconds for test, seconds in times.items()}, before)
    assert after.seconds(times) == before.seconds(times)


def test_what_grew_or_shrank_changes() -> None:
    assert rounded(5.0, 2) == 5
    assert rounded(0.6, 2) == 1
    assert rounded(0.1, 1) == 0
    assert rounded(1.2, 0) == 2


def test_what_did_not_run_keeps_its_time_and_what_is_gone_is_forgotten() -> None:
    times = {"tests/test_a.py::test_x": 3.0, "tests/test_a.py::test_y": 3.0, "tests/test_b.py::test_x": 3.0}
    before = measured(times)
    after = before.updated({}, ["tests/test_a.py::test_x"])
    assert list(after.seconds(times).values()) == [5, None, 5]
    assert before.without({"tests/test_b.py"}).files == {"tests/test_a.py"}


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    times = {"tests/a/test_a.py::test_x[1-'\"]": 3.0, "tests/a/test_a.py::test_y": 0.1, "tests/test_b.py::T::test": 0.1}
    file = tmp_path / "durations.json"
    measured(times).write(file)
    text = file.read_text()
    assert text.count("\n") == 6 + 2
    Durations.read(file).write(file)
    assert file.read_text() == text
    assert Durations.read(tmp_path / "none.json").files == frozenset()


def test_groups_are_no_part_of_a_name() -> None:
    assert without_group("tests/a.py::test_x[1]@group") == "tests/a.py::test_x[1]"
    assert without_group("tests/a.py::test_x[a@b]") == "tests/a.py::test_x[a@b]"


def test_durations_are_of_files_that_are_there() -> None:
    assert [file for file in Durations.read(DURATIONS).files if not (ROOT / file).is_file()] == []


# Runs of a few tests

CONFTEST = """
import pathlib, sys
sys.path.insert(0, HELPERS)
import tiers
tiers.DURATIONS = pathlib.Path(__file__).parent / "tests" / "durations.json"
tiers.END_TO_END = pathlib.Path(__file__).parent / "table.toml"
"""
TESTS = """
import time
import pytest
@pytest.fixture(scope="module")
def costly(): time.sleep(1.5)
def test_quick(): pass
def test_slow(): time.sleep(0.6)
def test_first(costly): pass
def test_second(costly): pass
def test_skipped(): pytest.skip()
@pytest.mark.parametrize("sec", [0, 0, 0.6])
def test_cases(sec): time.sleep(sec)
class TestShared:
    shares_results = True
    def test_a(self): time.sleep(1.2)
    def test_b(self): pass
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """Run pytest on TESTS, in a process of its own, and return what it prints."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("HELPERS", repr(str(ROOT / "tests" / "helpers"))))
    (tmp_path / "table.toml").write_text('[engine]\nmine = "tests/test_it.py::test_slow"\n')
    (tmp_path / "tests" / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tiers", "--rootdir=.", "-v", "tests"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "helpers")}

    def call(*options: str) -> str:
        done = subprocess.run(
            [*command, *options], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "a worker"])
def test_a_run_measures_and_the_next_one_leaves_out_what_is_slow(
    run: Callable[..., str], workers: tuple[str, ...], tmp_path: Path
) -> None:
    run("--write-durations", *workers)
    path = tmp_path / "tests" / "durations.json"
    [steps] = json.loads(path.read_text())["tests"].values()
    # Three characters for each function most of whose cases are quick, and for what is slow: one test, two that share
    # a fixture, whichever of them comes first, a case, and two that share results.
    assert {step: len(marks) / 3 for step, marks in steps.items()} == {"0": 2, "1": 6}
    passed = sorted(re.findall(r"test_it.py::(\S+) PASSED|PASSED tests/test_it.py::(\S+)", run("--quick", *workers)))
    assert ["".join(each) for each in passed] == ["test_cases[0_0]", "test_cases[0_1]", "test_quick", "test_slow"]


def test_single_tests_that_somebody_runs_write_no_durations(run: Callable[..., str], tmp_path: Path) -> None:
    run("--write-durations", "tests/test_it.py::test_quick")
    assert not (tmp_path / "tests" / "durations.json").exists()


# The table of end-to-end tests


def test_every_strategy_engine_framework_and_launcher_has_an_end_to_end_test() -> None:
    """Those of this distribution; what third parties register has tests of its own."""
    found = PluginManager().load()
    samples = ("sample", "small-zero", "local-sgd", "lars", "noise", "numpy")

    def names(*kinds: type) -> set[str]:
        own = {spec.name for kind in kinds for spec in found.registry(kind)}
        return {name for name in own if not name.startswith(samples) and not name.endswith("/numpy")}

    bindings = names(BindingSpec)
    bound = {name.partition("/")[0] for name in bindings}
    wanted = {
        "strategy": bindings | {name for name in names(StrategySpec) if name not in bound},
        "engine": names(EngineSpec),
        "framework": names(FrameworkSpec),
        "launcher": names(LauncherSpec),
    }
    table = {kind: set(names) for kind, names in end_to_end().items()}
    # One that knows no framework may be listed for several.
    table["strategy"] = {name if name in bindings else name.partition("/")[0] for name in table["strategy"]}
    assert {kind: table[kind] for kind in wanted} == wanted


def test_every_folder_of_the_product_has_an_end_to_end_or_a_quick_test() -> None:
    folders = {
        path.relative_to(ROOT).as_posix()
        for area in ("unidist", "adapters", "plugins", "launch/unidist_launch")
        for path in (ROOT / area).iterdir()
        if (path / "__init__.py").exists()
    }
    durations = Durations.read(DURATIONS)
    tested = {file for file in durations.files if durations.has_quick(file)}
    tested |= {test.partition("::")[0] for tests in end_to_end().values() for test in tests.values()}
    table = end_to_end()["folder"]
    missing = {
        folder
        for folder in folders
        if folder not in table and not any(file.startswith(f"tests/{folder}/") for file in tested)
    }
    assert missing == set(), "name a test of each under [folder] in tests/end_to_end.toml"


def test_the_tests_that_the_table_names_are_there(pytestconfig: pytest.Config) -> None:
    """By their functions; and by their cases, where this run has collected their files."""
    chosen = {test for tests in end_to_end().values() for test in tests.values()}
    for test in chosen:
        file, _, name = test.partition("::")
        function = name.partition("[")[0].rpartition("::")[2]
        assert re.search(rf"def {function}\b", (ROOT / file).read_text()) or "::Test" in test, test
    collected = set(pytestconfig.stash[COLLECTED])
    whole = (
        {test.partition("::")[0] for test in collected} if not any("::" in it for it in pytestconfig.args) else set()
    )
    assert {test for test in chosen if test.partition("::")[0] in whole} <= collected
