"""Which of Horovod's bindings a process takes, and that all ranks take the same."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import secrets
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace

import pytest

from unidist.errors import ConfigurationError
from unidist.jobs.pool.pool import RankPool
from unidist.rendezvous import Contribution, Rendezvous
from unidist.testing._rank_side import EngineConnector
from unidist_horovod.bindings import choice as bindings
from unidist_horovod.bindings.choice import SPECS, HorovodBindingSpec
from unidist_horovod.engine import HorovodEngine

TORCH, TENSORFLOW = SPECS
SECOND = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def lacking(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What each binding lacks, for a test to fill in; no framework is imported, no binding loaded."""
    found: dict[str, str] = {}
    monkeypatch.setattr(HorovodBindingSpec, "missing", lambda self: found.get(self.name, ""))
    monkeypatch.setattr(bindings, "_loaded", None)
    monkeypatch.delenv(bindings.VARIABLE, raising=False)
    for spec in SPECS:
        monkeypatch.delitem(sys.modules, spec.name, raising=False)
        monkeypatch.delitem(sys.modules, f"horovod.{spec.name}.mpi_ops", raising=False)
    return found


def imported(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())


def runs(monkeypatch: pytest.MonkeyPatch, spec: HorovodBindingSpec, *, running: bool = True) -> None:
    operations = SimpleNamespace(is_initialized=lambda: running)
    monkeypatch.setitem(sys.modules, f"horovod.{spec.name}.mpi_ops", operations)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [((), TORCH), (("tensorflow",), TENSORFLOW), (("torch",), TORCH), (("tensorflow", "torch"), TORCH)],
)
def test_the_binding_is_that_of_an_imported_framework(
    monkeypatch: pytest.MonkeyPatch, modules: tuple[str, ...], expected: HorovodBindingSpec
) -> None:
    imported(monkeypatch, *modules)
    assert bindings.choose() is expected


@pytest.mark.parametrize(("without", "expected"), [(TORCH, TENSORFLOW), (TENSORFLOW, TORCH)])
def test_an_imported_framework_that_horovod_does_not_know_does_not_count(
    monkeypatch: pytest.MonkeyPatch, lacking: dict[str, str], without: HorovodBindingSpec, expected: HorovodBindingSpec
) -> None:
    lacking[without.name] = f"Horovod was built without {without.title}"
    imported(monkeypatch, without.name)
    assert bindings.choose() is expected
    available = HorovodEngine().availability()
    assert available.usable
    assert available.reason.endswith(f"by its binding of {expected.title}")


def test_the_setting_wins_over_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    imported(monkeypatch, "torch")
    monkeypatch.setenv(bindings.VARIABLE, "tensorflow")
    assert bindings.choose() is TENSORFLOW


@pytest.mark.parametrize("name", ["torch", "tensorflow"])
def test_a_horovod_that_the_script_has_started_is_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mine, other = (TORCH, TENSORFLOW) if name == "torch" else (TENSORFLOW, TORCH)
    imported(monkeypatch, other.name)
    runs(monkeypatch, mine)
    runs(monkeypatch, other, running=False)
    assert bindings.choose() is mine
    monkeypatch.setenv(bindings.VARIABLE, other.name)
    with pytest.raises(ConfigurationError, match=f"has used Horovod by its binding of {mine.title}"):
        bindings.choose()


def test_a_process_stays_with_its_first_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "_loaded", TENSORFLOW)
    imported(monkeypatch, "torch")
    assert bindings.choose() is TENSORFLOW


def test_without_any_binding_it_says_what_each_one_lacks(
    monkeypatch: pytest.MonkeyPatch, lacking: dict[str, str]
) -> None:
    lacking |= {"torch": "PyTorch is not installed", "tensorflow": "Horovod was built without TensorFlow"}
    reason = HorovodEngine().availability().reason
    assert "PyTorch is not installed and Horovod was built without TensorFlow" in reason
    assert "unidist build horovod" in reason
    del lacking["torch"]
    assert HorovodEngine().availability().usable
    monkeypatch.setenv(bindings.VARIABLE, "tensorflow")
    asked = HorovodEngine().availability()
    assert not asked.usable
    assert "UNIDIST_HOROVOD_BINDING=tensorflow" in asked.reason


def test_a_misspelt_setting_lists_the_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bindings.VARIABLE, "tensorflo")
    with pytest.raises(ConfigurationError, match=r"'tensorflo'.*auto, torch, tensorflow"):
        bindings.choose()


def test_without_horovod_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    available = HorovodEngine().availability()
    assert not available.usable
    assert "Horovod is not installed; `unidist build horovod`" in available.reason


def test_equal_choices_pass_and_different_ones_name_the_ranks() -> None:
    class Answers(Rendezvous):
        def __init__(self, *names: str) -> None:
            self.names = names

        def allgather(self, payload: bytes, *, fds: Sequence[int] = (), timeout: timedelta) -> list[Contribution]:
            assert payload == b"torch"
            return [Contribution(name.encode()) for name in self.names]

        def close(self) -> None:
            pass

    bindings.check_same(TORCH, Answers("torch", "torch"), timeout=SECOND)
    with pytest.raises(ConfigurationError, match="PyTorch on rank 0, 2 and TensorFlow on rank 1"):
        bindings.check_same(TORCH, Answers("torch", "tensorflow", "torch"), timeout=SECOND)


@pytest.mark.parallel
def test_ranks_that_differ_raise_when_they_connect() -> None:
    for name in ("torch", "tensorflow"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")

    def case(connector: EngineConnector) -> str:
        rank = int(os.environ["UNIDIST_RANK"])
        before = os.environ.get("UNIDIST_HOROVOD_BINDING")
        os.environ["UNIDIST_HOROVOD_BINDING"] = ("torch", "tensorflow")[rank]
        try:
            connector.connect("differ")
        except ConfigurationError as exc:
            return str(exc)
        finally:
            os.environ.pop("UNIDIST_HOROVOD_BINDING")
            os.environ |= {} if before is None else {"UNIDIST_HOROVOD_BINDING": before}
        raise AssertionError("it connected")

    connector = EngineConnector("horovod", secrets.token_hex(4), timedelta(seconds=60))
    with RankPool(2) as pool:  # these ranks load other bindings than all others
        for text in pool.run(case, (connector,), timeout=timedelta(seconds=180)):
            assert "PyTorch on rank 0 and TensorFlow on rank 1" in text
