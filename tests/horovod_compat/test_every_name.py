"""Every public name of the installed Horovod is called by a case, and unidist takes all of its arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from unidist.horovod_imports.table import MODULES as ANSWERS

HERE = Path(__file__).parent
TABLES = ("torch_cases.py", "tensorflow_cases.py", "keras_cases.py")

# Prints, for each module that is named, its public names: the parameters of each, and those of a class's methods.
LIST = """
import importlib, inspect, json, sys
def parameters(item):
    try:
        found = inspect.signature(item).parameters.values()
    except (TypeError, ValueError):
        return None
    kept = [each.name for each in found if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return [name for name in kept if name != "self"]
def described(item):
    is_class = inspect.isclass(item)
    methods = {}
    for base in item.__mro__ if is_class else ():
        if base.__module__.startswith("horovod"):
            for name, method in vars(base).items():
                if inspect.isfunction(method) and not name.startswith("_"):
                    methods.setdefault(name, parameters(method))
    is_error = is_class and issubclass(item, Exception)
    return [parameters(item) if callable(item) and not is_error else None, methods]
found = {}
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    names = {each: getattr(module, each) for each in dir(module) if not each.startswith("_")}
    theirs = lambda item: getattr(item, "__module__", "horovod").startswith("horovod")
    found[name] = {n: described(i) for n, i in names.items() if not inspect.ismodule(i) and theirs(i)}
print(json.dumps(found))
"""
PARTS = {
    "torch": [name for name in ANSWERS if name.startswith("horovod.torch")],
    "tensorflow": [
        name for name in ANSWERS if name.startswith(("horovod.tensorflow", "horovod.keras", "horovod._keras"))
    ],
    "common": [name for name in ANSWERS if name.startswith("horovod.common")],
}
NOT_NAMES = {"MPI", "TYPE_CHECKING"}  # for annotations


@cache
def listing(part: str) -> dict[str, dict[str, tuple[list[str] | None, dict[str, list[str]]]]]:
    """Return what LIST prints; in a process of its own, as Horovod's library does not unload."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", LIST, *PARTS[part]], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(module: str, name: str) -> Any:
    """Return what unidist answers for a name; None if it has none, and says what to use instead."""
    answer = ANSWERS[module]
    if name in answer.missing:
        return None
    if name in answer.names:
        place, _, original = answer.names[name].partition(":")
        return getattr(importlib.import_module(place), original)
    return getattr(importlib.import_module(answer.module), name)


# Parameters that unidist does not take, by the name that they are of, with the reason.
LACKING = {
    "HorovodBasics.cuda_built": "only the facade of a framework knows",
    "HorovodBasics.nccl_built": "only the facade of a framework knows",
    "HorovodBasics.rocm_built": "only the facade of a framework knows",
    "HostUpdateResult": "what Python's enumerations take",
    "ProcessSet": "it takes ranks alone, and names them so",
    "is_iterable": "given by position",
    "split_list": "given by position",
}


def lacking(part: str) -> dict[str, list[str]]:
    """Return the parameters that unidist lacks, by `Name` or `Class.method`."""
    found: dict[str, list[str]] = {}
    for module, names in listing(part).items():
        for name, (wanted, methods) in names.items():
            if name in NOT_NAMES or (item := ours(module, name)) is None:
                continue
            checked = {name: (item, wanted)}
            checked |= {f"{name}.{method}": (getattr(item, method, None), wanted) for method, wanted in methods.items()}
            for label, (each, parameters) in checked.items():
                if each is None:
                    found[label] = ["(there is none)"]
                elif parameters is not None and (missing := _missing(each, parameters)):
                    found[label] = missing
    return found


def _missing(item: Any, wanted: list[str]) -> list[str]:
    taken = inspect.signature(item).parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in taken) and any(each.kind is each.VAR_KEYWORD for each in taken):
        return []
    by_position = [each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"]
    return [name for index, name in enumerate(wanted) if by_position[index : index + 1] != [name]]


@pytest.mark.parametrize("part", PARTS)
def test_unidist_takes_every_argument_in_horovods_order(part: str) -> None:
    pytest.importorskip("tensorflow" if part == "tensorflow" else "torch")
    assert {name: missing for name, missing in lacking(part).items() if name not in LACKING} == {}


def test_what_is_said_to_lack_parameters_does() -> None:
    for package in ("torch", "tensorflow"):
        pytest.importorskip(package)
    assert {name for part in PARTS for name in lacking(part)} == set(LACKING)


@cache
def words() -> frozenset[str]:
    """Return the names that the tables of cases use: attributes, texts and keywords."""
    found: set[str] = set()
    for table in TABLES:
        for node in ast.walk(ast.parse((HERE / table).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
            elif isinstance(node, ast.keyword) and node.arg:
                found.add(node.arg)
    return frozenset(found)


@pytest.mark.parametrize("part", PARTS)
def test_every_name_and_argument_is_in_a_case(part: str) -> None:
    pytest.importorskip("tensorflow" if part == "tensorflow" else "torch")
    names = {
        each
        for module, listed in listing(part).items()
        for name, (parameters, methods) in listed.items()
        if name not in NOT_NAMES and ours(module, name) is not None
        for each in (
            name,
            *(f"{name}({parameter}=)" for parameter in parameters or ()),
            *(f"{name}.{m}" for m in methods),
        )
    }
    untouched = {
        each
        for each in names
        if each.partition("(")[0].rpartition(".")[2] not in words()
        or ("(" in each and each[each.index("(") + 1 : -2] not in words())
    }
    print(sorted(untouched))
