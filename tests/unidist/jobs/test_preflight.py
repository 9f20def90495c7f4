"""What is checked before any process starts."""

from __future__ import annotations

import os

import pytest

from unidist.builtin import plugin as builtin
from unidist.engine import Availability, EngineSpec
from unidist.engines import single
from unidist.errors import ConfigurationError
from unidist.jobs import preflight
from unidist.registry import Registry
from unidist.runtime.plugin_manager import PluginManager, hookimpl
from unidist.settings.environment import Settings
from unidist.topology import Topology


class Foreign:
    """A plugin whose engine must not be imported by the launcher."""

    @hookimpl
    def unidist_register_engines(self, registry: Registry[EngineSpec]) -> None:
        """Register it."""
        registry.add(EngineSpec("foreign", "no_such_module:Engine", ""))


@pytest.fixture
def manager() -> PluginManager:
    made = PluginManager()
    made.register(builtin, name="core")
    made.register(Foreign(), name="foreign")
    return made


def test_defaults_pass(manager: PluginManager) -> None:
    preflight.check(Settings(), 3, manager)


def test_an_engine_of_the_core_is_asked_whether_it_can(manager: PluginManager) -> None:
    preflight.check(Settings(engine="single"), 1, manager)
    with pytest.raises(ConfigurationError, match="engine 'single' cannot be used for 2 processes: "):
        preflight.check(Settings(engine="single"), 2, manager)


def test_an_engine_that_the_machine_lacks_says_why(manager: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single.SingleEngine, "availability", lambda self: Availability(False, "no luck"))
    with pytest.raises(ConfigurationError, match="engine 'single' cannot be used on this machine: no luck"):
        preflight.check(Settings(engine="single"), 1, manager)


def test_a_foreign_engine_is_asked_in_a_process_of_its_own(manager: PluginManager) -> None:
    with pytest.raises(ConfigurationError, match="unknown engine 'foreign'"):  # that process knows what is installed
        preflight.check(Settings(engine="foreign"), 2, manager)


def test_where_ranks_run_elsewhere_a_foreign_engine_is_known_by_name(manager: PluginManager) -> None:
    preflight.check(Settings(engine="foreign"), 2, manager, here=False)
    with pytest.raises(ConfigurationError, match=r"unknown engine 'foreing'. Did you mean 'foreign'"):
        preflight.check(Settings(engine="foreing"), 2, manager)


def test_the_environment_of_the_ranks_decides_what_an_engine_finds() -> None:
    everything = PluginManager().load()
    with pytest.raises(ConfigurationError, match="these 2 processes were not started by mpirun"):
        preflight.check(Settings(engine="mpi"), 2, everything)
    preflight.check(Settings(engine="mpi"), 2, everything, environ={**os.environ, "PMI_RANK": "0", "PMI_SIZE": "2"})


def test_algorithms_and_strategies_are_looked_up(manager: PluginManager) -> None:
    preflight.check(Settings(allreduce_algorithm="ring", strategy="identity"), 4, manager)
    with pytest.raises(ConfigurationError, match="unknown all-reduce algorithm 'rong'"):
        preflight.check(Settings(allreduce_algorithm="rong"), 4, manager)
    with pytest.raises(ConfigurationError, match="unknown strategy 'zoro'"):
        preflight.check(Settings(strategy="zoro"), 4, manager)


def test_a_job_with_tls_needs_an_engine_that_encrypts_and_that_finds_its_library(manager: PluginManager) -> None:
    apart = Topology(world_size=2, local_size=1, num_nodes=2)
    with pytest.raises(ConfigurationError, match=r"--tls: engine 'foreign' does not encrypt .* those that do: none\."):
        preflight.check(Settings(engine="foreign", tls=True), 2, manager, topology=apart, here=False)
    with pytest.raises(ConfigurationError, match="--tls: no engine is installed that encrypts"):
        preflight.check(Settings(tls=True), 2, manager, topology=apart, here=False)
    preflight.check(Settings(tls=True), 2, manager)  # on one host nothing has to be encrypted


def test_an_elastic_job_needs_an_engine_that_reconnects(manager: PluginManager) -> None:
    preflight.check(Settings(engine="shm"), 2, manager, elastic=True)
    with pytest.raises(ConfigurationError, match=r"engine 'foreign' cannot reconnect .* those that can: single, shm"):
        preflight.check(Settings(engine="foreign"), 2, manager, elastic=True)


def test_an_elastic_job_refuses_what_does_not_survive_a_lost_rank() -> None:
    everything = PluginManager().load()
    for strategy in ("accumulate=2,clip_norm=1,pipeline=1", "pipeline=2", "tensor=2", "pipeline=2,tensor=2,zero=1"):
        preflight.check(Settings(strategy=strategy), 4, everything, elastic=True)
    strategy = "zero=1:shard=2"
    preflight.check(Settings(strategy=strategy), 4, everything)
    with pytest.raises(ConfigurationError, match=r"'zero' does not survive .* save checkpoints"):
        preflight.check(Settings(strategy=strategy), 4, everything, elastic=True)
