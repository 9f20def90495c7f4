"""setup.cfg names every package and every entry point's module; nothing is left out of a wheel."""

from __future__ import annotations

import configparser
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def test_every_package_is_listed(config: configparser.ConfigParser) -> None:
    found = {
        ".".join(path.parent.relative_to(ROOT if area == "unidist" else ROOT / area).parts)
        for area in ("unidist", "adapters", "plugins", "launch")
        for path in (ROOT / area).rglob("__init__.py")
    }
    assert set(config["options"]["packages"].split()) == found


def test_every_top_level_package_has_its_folder_and_is_marked_as_typed(config: configparser.ConfigParser) -> None:
    folders = dict(re.split(r"\s*=\s*", line) for line in config["options"]["package_dir"].strip().splitlines())
    assert folders.keys() == {name.partition(".")[0] for name in config["options"]["packages"].split()}
    for folder in folders.values():
        assert (ROOT / folder / "__init__.py").exists()
        assert (ROOT / folder / "py.typed").exists()


def test_entry_points_name_modules_that_exist(config: configparser.ConfigParser) -> None:
    for group in ("unidist", "console_scripts"):
        for line in config["options.entry_points"][group].strip().splitlines():
            module, _, _ = line.partition("=")[2].strip().partition(":")
            assert importlib.util.find_spec(module) is not None, line


def test_every_requirement_that_the_tests_install_is_pinned(config: configparser.ConfigParser) -> None:
    extras = config["options.extras_require"]
    wanted = "\n".join(
        [
            config["options"]["install_requires"],
            *map(extras.__getitem__, ("torch", "tensorflow", "mpi", "examples", "test", "dev")),
        ]
    )
    names = {re.match(r"[\w-]+", line)[0] for line in wanted.strip().splitlines() if line}  # type: ignore[index]
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert {normalised(name) for name in names} <= {normalised(name) for name in pinned}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
