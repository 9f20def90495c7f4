"""What the files of this project do not say of each other, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from typing import NamedTuple

from tools.affected.graph import Link
from tools.affected.sources import PRODUCT, Sources


class Subject(NamedTuple):
    """Tests that a change of certain files affects; both are patterns of paths, in which "*" stands for any text."""

    files: str
    tests: str
    reason: str


SUBJECTS = (
    Subject("constraints.txt", "*", "runs with the versions of this file"),
    Subject("setup.cfg", "*", "runs with the entry points and the options of pytest of this file"),
    Subject("setup.py", "*", "runs with the extensions that this file builds"),
    Subject("pyproject.toml", "tests/tools/*", "checks sources by the rules of this file"),
    Subject("Makefile", "tests/test_makefile.py", "runs make"),
    Subject("*.md", "tests/test_docs.py", "reads all pages"),
    *(
        Subject(f"{area}*", f"tests/{test}.py", reason)
        for area in PRODUCT
        for test, reason in (
            ("test_packaging", "looks at every folder of the sources"),
            ("test_faces", "imports every package"),
            ("test_imports", "counts what imports bring along"),
            ("test_without_torch", "installs a wheel of the sources"),
            ("tools/layout/test_layout", "reads all sources"),
            ("unidist/settings/test_environment", "reads all sources"),
        )
    ),
)

ABOUT_TESTS = {
    "tests/durations.json": "tests/test_tiers.py",
    "tests/end_to_end.toml": "tests/test_tiers.py",
    "tests/proven.json": "tests/tools/ci/*",
}
"""Files that say when a test runs, and not what it does, with the tests of those files.

Hooks for all tests read them; without this list a change of one would affect all tests.
"""

_TCP = ("unidist_tcp.plugin",)
LOADERS = {
    "unidist/keras/_backend.py": ("unidist_tensorflow.plugin", "unidist_jax.plugin"),
    **{f"tests/helpers/{name}.py": _TCP for name in ("pretended_hosts", "slurm_cluster", "ssh_hosts")},
}
"""Files that use what plugins registered without naming it: the backend of Keras, the engine of several hosts."""

TABLES = {"unidist/horovod_imports/table.py": "tests/unidist/horovod_imports/*"}
"""Files with names of modules, each of which is imported if a script asks for it, with the tests that ask for them."""

CODE = ("*.in", "*.ipynb", "docs/plugins.md")
"""Files with Python code that tests run, and that are not Python files."""


def is_about_tests(path: str) -> bool:
    """Whether a file says when a test runs, and not what it does."""
    return path in ABOUT_TESTS


def subject_links(sources: Sources) -> Iterator[Link]:
    """Yield the links of the lists above, and those of the tests of a package to each file of it."""
    about = (Subject(file, tests, "checks") for file, tests in ABOUT_TESTS.items())
    for subject in (*SUBJECTS, *about):
        tests = [test for test in sources.tests if fnmatch(test, subject.tests)]
        for file in sources.files:
            if fnmatch(file, subject.files):
                yield from (Link(test, file, f"{subject.reason}: {file}", is_alone=True) for test in tests)
    for file in sources.files:
        folder = "/".join(file.split("/")[:2])  # a package, or a folder of the core
        if file.startswith(PRODUCT) and folder != file:
            for test in sources.tests.intersection(sources.inside(f"tests/{folder}")):
                yield Link(test, file, f"is a test of {folder}", is_alone=True)
