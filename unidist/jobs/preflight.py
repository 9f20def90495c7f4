"""Checks before any process starts: names, sizes and combinations of options.

Runs in the launcher and in `unidist.run`; imports no framework.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from unidist.engines.choice import check_engine
from unidist.errors import ConfigurationError, unknown_choice
from unidist.jobs import engine_check
from unidist.launcher import SideProcess
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings
from unidist.strategy.elastic_support import check_plan
from unidist.strategy.interface import NamesPlugins, Plan, RunsSideProcesses
from unidist.strategy.plan import build, make_plan
from unidist.topology import Topology

AUTO = "auto"
"""The engine name that leaves the choice to `init()`."""


def check(
    settings: Settings,
    num_proc: int,
    manager: PluginManager,
    *,
    topology: Topology | None = None,
    elastic: bool = False,
    here: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Plan | None:
    """Check what the user chose for a job of `num_proc` processes.

    Returns:
        The plan; None if no strategy is named, so that training is plain data parallelism.

    Args:
        settings: engine, strategy and algorithm, as the ranks will read them.
        num_proc: number of ranks.
        manager: loaded plugins.
        topology: place of one of the ranks; default: all are on this host.
        elastic: ranks may be lost, come and go.
        here: this process starts the ranks itself, on this machine: the engine that was asked for must be usable on it.
            Elsewhere only its name can be checked, and the ranks say.
        environ: the environment of the ranks; default: that of this process.

    Raises:
        ConfigurationError: an unknown name, an engine that cannot run here, sizes that do not fit the
            world, strategies that do not go together, or, in an elastic job, do not survive the loss of a rank.
    """
    place = topology or Topology(world_size=num_proc, local_size=num_proc)
    tls = settings.tls and not place.single_host
    environ = os.environ if environ is None else environ
    if settings.engine != AUTO:
        check_engine(manager.engines.get(settings.engine), manager.engines, elastic=elastic, tls=tls)
        _check_engine(settings.engine, place, manager, here=here, environ=environ)
    elif tls:
        _check_encryption(place, manager, environ)
    if settings.allreduce_algorithm is not None:
        from unidist.algorithms import ALGORITHMS

        if settings.allreduce_algorithm not in ALGORITHMS:
            raise unknown_choice("all-reduce algorithm", settings.allreduce_algorithm, ALGORITHMS)
    if not settings.strategy:
        return None
    strategies = build(settings.strategy, manager.strategies)
    plan = make_plan(strategies, num_proc, manager.strategies)
    if elastic:
        check_plan(plan)
    for strategy in strategies:
        if isinstance(strategy, NamesPlugins):
            strategy.check_plugins(manager)
    return plan


def side_processes(plan: Plan | None) -> tuple[SideProcess, ...]:
    """Return the processes beside the ranks that the strategies of a plan need.

    Raises:
        ConfigurationError: two of them have the same role and index.
    """
    if plan is None:
        return ()
    found = [process for item in plan.all(RunsSideProcesses) for process in item.side_processes(plan)]
    names = [(process.role, process.index) for process in found]
    twice = [f"{role} {index}" for role, index in names if names.count((role, index)) > 1]
    if twice:
        raise ConfigurationError(f"two strategies have a process {twice[0]} beside the ranks; leave one out")
    return tuple(found)


def _check_encryption(topology: Topology, manager: PluginManager, environ: Mapping[str, str]) -> None:
    """Ask an engine that encrypts whether it can. The hosts have the same setup, so only this one is asked, at once."""
    able = [spec.name for spec in manager.engines if spec.encrypts and spec.priority >= 0]
    problems = [engine_check.ask(name, topology, environ) for name in able]
    if all(problems):
        raise ConfigurationError(f"--tls: {'; '.join(problems) or 'no engine is installed that encrypts'}")


def _check_engine(
    name: str, topology: Topology, manager: PluginManager, *, here: bool, environ: Mapping[str, str]
) -> None:
    spec = manager.engines.get(name, hint=f"{AUTO!r} chooses for you.")
    if spec.path.startswith("unidist."):
        engine_check.check(spec.load(), name, topology)
    elif here:  # in a process of its own: an engine that moves device memory imports a framework to find devices
        problem = engine_check.ask(name, topology, environ)
        if problem:
            raise ConfigurationError(problem)
