"""Fixtures for every test: the public test kit's own, and ranks that many tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, and no limit of time for one: a failure has to mean that something is wrong.
# To look for new examples: --hypothesis-profile=default
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")

# A test starts processes by the dozen: none of them is to compile what the one before it has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests of JAX compile small programs by the hundred: that takes longer than running them, however slow they are.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# A shell that starts the tests in the background has SIGINT ignored, and nohup SIGHUP, for everything that they start,
# too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Of the last two, `tiers` sees the tests first: it reads their names before pytest-xdist adds groups, and before
# any is left out.
pytest_plugins = ["unidist.testing.fixtures", "part_pools", "unidist_command", "run_control", "tiers"]

sys.path.insert(0, str(Path(__file__).parent / "helpers"))  # what several folders share; the ranks get this path too


_ONE_AT_A_TIME = {"ray", "spark", "unidist_ray", "unidist_spark"}
"""Folders of tests that start clusters: a driver of Ray ends with a cluster that it found, and was not its own."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that share ranks into one group: where several processes run tests, one of them runs all of a group.

    Those of JAX and TensorFlow are several groups, since they take longest: two processes may have a pool each.
    """
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let Python's collector leave alone what was imported by now: frameworks are half a million objects."""
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist ignores the groups of tests with this pytest: install pytest < 9.2")
    gc.collect()
    gc.freeze()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the ranks that a group has shared when its last test is over, where groups are run one after the other."""
    in_groups = hasattr(item.config, "workerinput")
    if in_groups and (nextitem is None or _group(item) != _group(nextitem)):
        for fixture in _SHARED_RANKS & getattr(item, "funcargs", {}).keys():
            item.funcargs[fixture].close()  # type: ignore[attr-defined]  # of a function


_SHARED_RANKS = {"tensorflow_pools", "torch_pools", "jax_pools"}


def _group(item: pytest.Item) -> str:
    file = item.nodeid.partition("::")[0]
    for fixture in sorted(_SHARED_RANKS & set(getattr(item, "fixturenames", ()))):
        is_parallel = file.startswith("tests/parallel/")  # about half of TensorFlow's
        parts = {"jax_pools": file.split("/")[1], "tensorflow_pools": "parallel" if is_parallel else "others"}
        return f"{fixture} {parts.get(fixture, '')}".strip()
    if set(file.split("/")) & _ONE_AT_A_TIME:
        return "clusters"
    return "/".join(file.split("/")[:3]) if file.startswith("tests/adapters/") else file
