"""Nothing is left out of a wheel; setup.cfg names every top-level package and every entry point's module."""

from __future__ import annotations

import configparser
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
AREAS = ("unidist", "adapters", "plugins", "launch")


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def test_every_folder_with_modules_is_a_package() -> None:
    # What has no __init__.py is found by no find_packages, and is in no wheel.
    folders = {path.parent for area in AREAS for path in (ROOT / area).rglob("*.py")}
    assert len(folders) > 50
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_top_level_package_has_its_folder_and_is_marked_as_typed(config: configparser.ConfigParser) -> None:
    folders = dict(re.split(r"\s*=\s*", line) for line in config["options"]["package_dir"].strip().splitlines())
    found = {path.parent.name for area in AREAS[1:] for path in (ROOT / area).glob("*/__init__.py")}
    assert folders.keys() == found | {"unidist"}
    assert set(config["mypy"]["packages"].split(",")) == folders.keys()
    for folder in folders.values():
        assert (ROOT / folder / "__init__.py").exists()
        assert (ROOT / folder / "py.typed").exists()


def test_entry_points_name_modules_that_exist(config: configparser.ConfigParser) -> None:
    for group in ("unidist", "console_scripts", "torch.backends"):
        for line in config["options.entry_points"][group].strip().splitlines():
            module, _, _ = line.partition("=")[2].strip().partition(":")
            assert importlib.util.find_spec(module) is not None, line


def test_every_requirement_that_the_tests_install_is_pinned(config: configparser.ConfigParser) -> None:
    extras = config["options.extras_require"]
    installed = ("torch", "tensorflow", "jax", "mpi", "examples", "test", "dev", "coverage", "docs", "release")
    wanted = "\n".join(
        [
            config["options"]["install_requires"],
            *map(extras.__getitem__, installed),
        ]
    )
    names = {re.match(r"[\w-]+", line)[0] for line in wanted.strip().splitlines() if line}  # type: ignore[index]
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert {normalised(name) for name in names} <= {normalised(name) for name in pinned}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_extensions_mean_the_same_whichever_python_has_built_them() -> None:
    # One built by 3.12 serves 3.11 too. There these macros take no reference, as None, True and False live for ever:
    # each call of such a function brought 3.11 closer to "Fatal Python error: deallocating None".
    sources = [path for area in AREAS for path in (ROOT / area).rglob("*.[ch]")]
    assert len(sources) > 15
    assert [path for path in sources if "Py_RETURN_" in path.read_text(encoding="utf-8")] == []
