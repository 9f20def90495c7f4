"""docs/horovod.md lists everything that Horovod 0.28.1 has, and what it says of each is so."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import click
import pytest

from unidist.horovod_imports.table import ABSENT, why_absent
from unidist.horovod_imports.table import MODULES as ANSWERS
from unidist.settings.environment import HOROVOD_VARIABLES, LOG_LEVELS, Settings, configure_logging
from unidist.settings.placement import read_placement
from unidist_launch.commands.launch import launch
from unidist_launch.horovod import run
from unidist_launch.options import horovodrun

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = importlib.util.find_spec("horovod") is not None

needs_horovod = pytest.mark.skipif(not INSTALLED, reason="Horovod is not installed (`unidist build horovod`)")

# What Horovod's C++ reads by getenv: common/common.h, common/logging.cc, common/gloo/gloo_context.cc and
# common/utils/env_parser.cc of the sdist of 0.28.1, which are not installed.
NATIVE_VARIABLES = """
HOROVOD_ADASUM_MPI_CHUNK_SIZE HOROVOD_AUTOTUNE HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES
HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE HOROVOD_AUTOTUNE_LOG HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE
HOROVOD_AUTOTUNE_WARMUP_SAMPLES HOROVOD_BATCH_D2D_MEMCOPIES HOROVOD_CACHE_CAPACITY HOROVOD_CCL_CACHE
HOROVOD_CONTROLLER HOROVOD_CPU_OPERATIONS HOROVOD_CROSS_RANK HOROVOD_CROSS_SIZE HOROVOD_CYCLE_TIME
HOROVOD_DISABLE_GROUP_FUSION HOROVOD_DISABLE_NVTX_RANGES HOROVOD_DYNAMIC_PROCESS_SETS HOROVOD_ELASTIC
HOROVOD_ENABLE_ASYNC_COMPLETION HOROVOD_ENABLE_XLA_OPS HOROVOD_FUSION_THRESHOLD HOROVOD_GLOO_IFACE
HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_GLOO_RENDEZVOUS_PORT HOROVOD_GLOO_TIMEOUT_SECONDS
HOROVOD_HIERARCHICAL_ALLGATHER HOROVOD_HIERARCHICAL_ALLREDUCE HOROVOD_HOSTNAME HOROVOD_LOCAL_RANK
HOROVOD_LOCAL_SIZE HOROVOD_LOG_HIDE_TIME HOROVOD_LOG_LEVEL HOROVOD_MPI_THREADS_DISABLE HOROVOD_NUM_NCCL_STREAMS
HOROVOD_RANK HOROVOD_SIZE HOROVOD_STALL_CHECK_DISABLE HOROVOD_STALL_CHECK_TIME_SECONDS
HOROVOD_STALL_SHUTDOWN_TIME_SECONDS HOROVOD_THREAD_AFFINITY HOROVOD_TIMELINE HOROVOD_TIMELINE_MARK_CYCLES
HOROVOD_TORUS_ALLREDUCE
""".split()  # noqa: SIM905 - a list of 44 lines says no more


# For each module that is named in the command, its public names that are no modules, each with the names of its
# parameters; null for what is not called. And the packages' own modules.
LIST_NAMES = """
import importlib, inspect, json, pkgutil, sys
def parameters(item):
    if not callable(item) or (inspect.isclass(item) and issubclass(item, Exception)):
        return None
    found = inspect.signature(item).parameters.values()
    return [each.name for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    names = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    theirs = lambda item: getattr(item, "__module__", "horovod").startswith("horovod")
    ours = {name: item for name, item in names.items() if not inspect.ismodule(item) and theirs(item)}
    found[name] = {name: parameters(item) for name, item in ours.items()}
    found[name + ".*"] = {each.name: None for each in pkgutil.iter_modules(getattr(module, "__path__", []))}
print(json.dumps(found))
"""


class Row(NamedTuple):
    """A line of a table."""

    name: str
    status: str
    remark: str


@cache
def table(heading: str) -> dict[str, Row]:
    """Return the lines of the table under a heading that contains `heading`, by name; none stands twice."""
    text = (ROOT / "docs" / "horovod.md").read_text(encoding="utf-8")
    (section,) = (part for part in text.split("\n## ") if heading in part.partition("\n")[0])
    rows = [Row(*found) for found in re.findall(r"^\| `([^`]+)` \| ([\w' ]+) \| (.*?) ?\|$", section, re.MULTILINE)]
    assert len(rows) == section.count("\n| `")
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


FLAGS, VARIABLES = table("Flags"), table("Environment")
TORCH, TENSORFLOW, KERAS = table("`horovod.torch`"), table("`horovod.tensorflow`"), table("`horovod.keras`")

# Horovod's modules: the table that lists their names, and what precedes them there.
MODULES = {
    "horovod.torch": (TORCH, ""),
    "horovod.tensorflow": (TENSORFLOW, ""),
    "horovod.tensorflow.elastic": (TENSORFLOW, "elastic."),
    **{
        f"horovod.{package}{'.' if part else ''}{part.rstrip('.')}": (KERAS, part)
        for package in ("keras", "tensorflow.keras")
        for part in ("", "callbacks.", "elastic.")
    },
}
# Lists of modules for one process each: the libraries that Horovod loads do not go together, and do not unload.
NEEDS_A_CLUSTER = ("horovod.ray", "horovod.spark")  # whose libraries are in the environment of integrations only
ALL_MODULES = tuple(each for each in dict.fromkeys((*MODULES, *ANSWERS)) if not each.startswith(NEEDS_A_CLUSTER))
PROCESSES = (
    tuple(module for module in ALL_MODULES if module.startswith("horovod.torch")),
    tuple(module for module in ALL_MODULES if not module.startswith("horovod.torch")),
)
NOT_NAMES = {"MPI", "TYPE_CHECKING"}  # for type annotations, in modules without __all__


def named(rows: dict[str, Row], *statuses: str) -> list[str]:
    return [row.name for row in rows.values() if row.status in statuses]


def told(*statuses: str) -> list[tuple[str, str]]:
    """Return module and name of what the tables of names say is so."""
    return [
        (module, name.removeprefix(prefix))
        for module, (rows, prefix) in MODULES.items()
        for name in named(rows, *statuses)
        if name.startswith(prefix) and "." not in name.removeprefix(prefix)
    ]


def facade(module: str) -> ModuleType:
    """Return unidist's module in place of Horovod's."""
    pytest.importorskip("torch" if module == "horovod.torch" else "tensorflow")
    return importlib.import_module(module.replace("horovod", "unidist"))


def installed_source(relative: str) -> Path:
    spec = importlib.util.find_spec("horovod")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / relative


@cache
def options() -> dict[str, click.Option]:
    """Return every option of `unidist launch` that carries something out, by each of its names."""
    tuning = {name for flag in horovodrun.TUNING for names in flag.names for name in names.split("/")}
    found = {"-h": click.Option(["-h"]), "--help": click.Option(["--help"])}  # click adds them when it parses
    for item in launch.params:
        if isinstance(item, click.Option):
            found |= {name: item for name in (*item.opts, *item.secondary_opts) if name not in tuning}
    return found


def test_every_status_is_one_of_those_that_the_page_explains() -> None:
    for rows in (TORCH, TENSORFLOW, KERAS):
        assert {row.status for row in rows.values()} == {"supported", "changed", "refused"}
    assert {row.status for row in FLAGS.values()} == {"supported", "changed", "Horovod's"}
    assert {row.status for row in VARIABLES.values()} == {"supported", "changed", "not read"}


def test_what_is_not_simply_supported_is_explained() -> None:
    rows = [row for rows in (TORCH, TENSORFLOW, KERAS, FLAGS) for row in rows.values()]
    assert [row.name for row in rows if row.status != "supported" and not row.remark] == []


# Against Horovod


@cache
def listing(process: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Return how LIST_NAMES ended; in a process of its own, as Horovod's library does not unload."""
    command = [sys.executable, "-c", LIST_NAMES, *process]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@cache
def horovod_names(process: tuple[str, ...]) -> dict[str, dict[str, list[str] | None]]:
    """Return what LIST_NAMES prints."""
    done = listing(process)
    if "Extension" in done.stderr and "has not been built" in done.stderr:
        pytest.skip(f"Horovod was built without the binding of {process[0]}")
    assert done.returncode == 0, done.stderr
    names: dict[str, dict[str, list[str] | None]] = json.loads(done.stdout.splitlines()[-1])
    return names


def names_of(module: str) -> dict[str, list[str] | None]:
    (process,) = (each for each in PROCESSES if module in each)
    return horovod_names(process)[module]


@needs_horovod
@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_of_horovod_is_listed(module: str) -> None:
    rows, prefix = MODULES[module]
    listed = {name.removeprefix(prefix) for name in rows if name.startswith(prefix)}
    assert {name for name in names_of(module) if name not in listed} == set()


@needs_horovod
@pytest.mark.parametrize("rows", [TORCH, TENSORFLOW, KERAS], ids=["torch", "tensorflow", "keras"])
def test_nothing_is_listed_that_horovod_has_not(rows: dict[str, Row]) -> None:
    found = {prefix + name for module, (other, prefix) in MODULES.items() if other is rows for name in names_of(module)}
    if rows is TENSORFLOW:
        found |= horovod_names(PROCESSES[1])["horovod.tensorflow.*"].keys()
    assert set(rows) - found == set()


@needs_horovod
def test_every_module_of_horovods_tensorflow_part_is_listed() -> None:
    names_of("horovod.tensorflow")
    modules = horovod_names(PROCESSES[1])
    assert "mpi_ops" in modules["horovod.tensorflow.*"]
    assert modules["horovod.tensorflow.*"].keys() - TENSORFLOW.keys() == set()
    for name in ("horovod.keras", "horovod.tensorflow.keras"):
        assert {f"{name}.{part}" for part in modules[f"{name}.*"]} <= MODULES.keys()


@needs_horovod
def test_every_module_of_horovod_is_answered_or_says_what_to_use_instead() -> None:
    root = installed_source("")
    files = [file.relative_to(root.parent).with_suffix("") for file in root.rglob("*.py")]
    modules = {".".join(file.parts).removesuffix(".__init__") for file in files}
    assert "horovod.torch.elastic.state" in modules
    assert {module for module in modules if module not in ANSWERS and not why_absent(module)} == set()
    assert ANSWERS.keys() - modules == set()


def test_the_table_of_modules_is_that_of_the_import_hook() -> None:
    rows = table("Modules of")
    assert {row.name for row in rows.values() if row.status != "refused"} == set(ANSWERS)
    assert {row.name: row.remark for row in rows.values() if row.status == "refused"} == ABSENT


@needs_horovod
def test_run_takes_every_argument_of_horovods_in_the_same_order() -> None:
    assert list(inspect.signature(run).parameters) == names_of("horovod")["run"]


@needs_horovod
@pytest.mark.parametrize("module", ANSWERS)
def test_every_name_of_a_module_is_answered_or_says_what_to_use_instead(module: str) -> None:
    if module.startswith(NEEDS_A_CLUSTER):
        pytest.skip("tests/plugins has a test of it, in the environment that has the library")
    answer = ANSWERS[module]
    theirs = names_of(module).keys() - NOT_NAMES
    ours = set(importlib.import_module(answer.module).__all__) if answer.module else set()
    ours |= answer.names.keys()
    assert theirs - ours - answer.missing.keys() == set()
    assert answer.missing.keys() & ours == set()


@pytest.mark.parametrize("module", ANSWERS)
def test_what_a_module_is_answered_with_exists(module: str) -> None:
    if module.startswith(NEEDS_A_CLUSTER):
        pytest.skip("tests/plugins has a test of it, in the environment that has the library")
    for place in ANSWERS[module].names.values():
        defined_in, _, name = place.partition(":")
        assert hasattr(importlib.import_module(defined_in), name), place


@needs_horovod
def test_every_flag_of_horovodrun_is_listed() -> None:
    flags = {"-h", "--help"}
    for node in ast.walk(ast.parse(installed_source("runner/launch.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = {item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)}
            flags |= {name for name in names if name.startswith("-")}
    assert "-np" in flags
    assert flags == set(FLAGS)


@needs_horovod
def test_every_variable_of_horovod_is_listed() -> None:
    found = set(NATIVE_VARIABLES)
    for file in installed_source("").rglob("*.py"):
        found |= set(re.findall(r"\bHOROVOD_[A-Z0-9_]+\b", file.read_text(encoding="utf-8")))
    codes = {name for name in found if name.startswith("HOROVOD_PROCESS_SET_ERROR_")}  # values, not variables
    assert "HOROVOD_START_TIMEOUT" in found
    assert found - codes == set(VARIABLES)


# Against unidist


@pytest.mark.parametrize(("module", "name"), told("supported", "changed"))
def test_a_name_that_is_called_supported_exists(module: str, name: str) -> None:
    assert hasattr(facade(module), name)


@pytest.mark.parametrize("name", ["run", "TorchState", "ElasticSampler"])
def test_the_names_of_elastic_that_the_page_tells_exist(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs" / "horovod.md").read_text(encoding="utf-8")
    torch = pytest.importorskip("unidist.torch")
    assert hasattr(torch.elastic, name)


@pytest.mark.parametrize(("module", "name"), told("refused"))
def test_a_name_that_is_called_refused_does_not_exist(module: str, name: str) -> None:
    found = facade(module)
    assert not hasattr(found, name)
    if hasattr(found, "__path__"):
        assert importlib.util.find_spec(f"{found.__name__}.{name}") is None


@needs_horovod
@pytest.mark.parametrize(("module", "name"), told("supported"))
def test_a_supported_function_takes_every_argument_of_horovods_in_the_same_order(module: str, name: str) -> None:
    wanted = names_of(module).get(name)
    if wanted is None or name == "shutdown":  # it takes anything, and uses nothing
        return
    found = inspect.signature(getattr(facade(module), name)).parameters
    assert [item for item in wanted if item not in found] == []
    by_position = [item.name for item in found.values() if item.kind is item.POSITIONAL_OR_KEYWORD]
    assert by_position[: len(wanted)] == wanted


@needs_horovod
@pytest.mark.parametrize("module", ["horovod.keras", "horovod.tensorflow.keras", "horovod.tensorflow"])
def test_optimizers_and_tapes_take_every_argument_of_horovods_in_the_same_order(module: str) -> None:
    kinds = ("DistributedOptimizer", "PartialDistributedOptimizer", "DistributedGradientTape")
    found = {name: wanted for name, wanted in names_of(module).items() if name in kinds}
    assert found
    for name, wanted in found.items():
        assert wanted is not None
        assert list(inspect.signature(getattr(facade(module), name)).parameters)[: len(wanted)] == wanted


@pytest.mark.parametrize("flag", named(FLAGS, "supported", "changed"))
def test_a_flag_that_is_called_supported_is_an_option(flag: str) -> None:
    assert flag in options()


def test_a_flag_that_is_called_horovods_is_a_warning_and_no_other_is() -> None:
    tuning = {name for flag in horovodrun.TUNING for names in flag.names for name in names.split("/")}
    assert set(named(FLAGS, "Horovod's")) == tuning


def test_flags_that_are_so_anyway_say_why() -> None:
    assert all(FLAGS[name].remark.startswith("Always so") for name in horovodrun.ALREADY_SO)
    assert {name for name, row in FLAGS.items() if row.remark.startswith("Always so")} == set(horovodrun.ALREADY_SO)


VALUES = {
    "HOROVOD_TIMELINE": "t.json",
    "HOROVOD_TIMELINE_MARK_CYCLES": "1",
    "HOROVOD_FUSION_THRESHOLD": "123",
    "HOROVOD_CYCLE_TIME": "12",
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_LOG": "tune.csv",
    "HOROVOD_CACHE_CAPACITY": "12",
    "HOROVOD_STALL_CHECK_DISABLE": "1",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "12",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "12",
    "HOROVOD_START_TIMEOUT": "12",
    "HOROVOD_ELASTIC_TIMEOUT": "12",
}
PLACE = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "4",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "a",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "5",
}
CHANGED_PLACE = {"HOROVOD_RANK": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_CROSS_RANK": "2"}


@pytest.mark.parametrize("name", named(VARIABLES, "supported", "changed"))
def test_a_variable_that_is_called_supported_changes_what_is_read(name: str, caplog: pytest.LogCaptureFixture) -> None:
    if name in PLACE:
        assert read_placement({**PLACE, name: CHANGED_PLACE.get(name, "16")}) != read_placement(PLACE)
    elif name in VALUES:
        assert Settings.read({name: VALUES[name]}) != Settings()
    else:  # logging's: a value that cannot be read is a warning that names it
        with caplog.at_level("WARNING", logger="unidist"):
            configure_logging({name: "no such value"})
        assert f"{name}='no such value'" in caplog.text


@pytest.mark.parametrize("name", named(VARIABLES, "not read"))
def test_a_variable_that_is_called_not_read_changes_nothing(name: str) -> None:
    assert Settings.read({name: "7"}) == Settings()
    assert read_placement({name: "7"}) == read_placement({})


def test_the_tables_of_the_sources_agree_with_the_page() -> None:
    assert set(HOROVOD_VARIABLES) == set(named(VARIABLES, "supported", "changed")) - set(PLACE)
    assert set(horovodrun.WITHOUT_EFFECT) <= set(named(VARIABLES, "not read"))


def test_the_defaults_that_the_page_names_are_so() -> None:
    default = Settings()
    assert default.timeout == timedelta(seconds=1800)
    assert default.start_timeout == timedelta(seconds=120)
    assert default.fusion_threshold_bytes == 64 << 20
    assert default.cache_capacity == 8192
    assert set(LOG_LEVELS) == {"trace", "debug", "info", "warning", "error", "fatal"}
