"""The strategy line of parameter servers: what is checked before any process starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import Plan, build, check_plan, make_plan
from unidist_parameter_server.strategy import ParameterServer


def plan(line: str, size: int = 4) -> Plan:
    registry = PluginManager().load().strategies
    return make_plan(build(line, registry), size, registry)


def test_options_of_the_line() -> None:
    strategy, *others = plan("parameter_server=async:staleness=3:push=delta:shard_size=1MiB,accumulate=3").strategies
    assert strategy == ParameterServer("async", staleness=3, push="delta", shard_size="1MiB")
    assert [item.name for item in others] == ["accumulate"]


@pytest.mark.parametrize(
    "line",
    [
        "parameter_server=sync",
        "parameter_server=sync:backup=3",
        "parameter_server=async",
        "parameter_server=async:staleness=0",
        "parameter_server=async:push_every=4:fetch_every=4:modulate=staleness:scale=none",
        "parameter_server=async,clip_value=1",
        "parameter_server=sync,precision=bf16",
    ],
)
def test_what_can_be(line: str) -> None:
    strategy = plan(line).strategies[0]
    assert isinstance(strategy, ParameterServer)
    assert strategy.is_together == ("=sync" in line or "staleness=0" in line)
    assert strategy.steps_alone == (not strategy.is_together or strategy.backup > 0)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("parameter_server", "needs a value"),
        ("parameter_server=fast", "async, sync"),
        ("parameter_server=sync:staleness=1", "workers of async may be ahead"),
        ("parameter_server=async:staleness=-1", "staleness=-1: give 0 steps or more"),
        ("parameter_server=async:backup=1", "nobody waits for gradients; use sync"),
        ("parameter_server=sync:backup=4", "of 4 gradients at least 1 must count; give 0 to 3"),
        ("parameter_server=sync:backup=-1", "give 0 to 3"),
        ("parameter_server=sync:push_every=2:scale=none", "push_every=2:scale=none: in a synchronous step"),
        ("parameter_server=async:staleness=0:modulate=staleness", "in a synchronous step"),
        ("parameter_server=async:push_every=0", "push_every=0: give 1 step or more"),
        ("parameter_server=async:staleness=1:fetch_every=2", "bounds how old parameters are"),
        ("parameter_server=async:push=delta:modulate=staleness", "a difference has no learning rate"),
        ("parameter_server=async:push=all", "delta, grad"),
        ("parameter_server=async:shard_size=256", "shard_size=256: .*as in 256KiB"),
        ("parameter_server=async:servers=-1", "servers=-1: give 0 to 1000 servers"),
        ("parameter_server=async:replicas=1", "replicas=1 with servers=0: give 0, or 1 with 2 servers or more"),
        ("parameter_server=async:servers=1:replicas=1", "give 0, or 1 with 2 servers or more"),
        ("parameter_server=async:servers=2:replicas=2", "give 0, or 1 with 2 servers or more"),
        ("parameter_server=async,clip_norm=1", "no gradient of all of them; use clip_value, or clip each worker's own"),
        ("parameter_server=sync,clip_norm=1", "the mean gradient is in the store alone; use data with clip_norm"),
        ("parameter_server=sync,clip_value=1", "use data with clip_value"),
        ("parameter_server=async,precision=fp16", "use precision=bf16"),
        ("parameter_server=async,zero=1", "both own the gradient exchange"),
        ("parameter_server=async,tensor=2", "keeps whole models, which are divided by 'tensor'"),
        ("parameter_server=async,pipeline=2", "keeps whole models, which are divided by 'pipeline'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(line: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint) as caught:
        plan(line)
    assert "\n" not in str(caught.value)


def test_servers_are_processes_beside_the_ranks() -> None:
    made = plan("parameter_server=async:servers=2:replicas=1")
    strategy = made.strategies[0]
    assert isinstance(strategy, ParameterServer)
    processes = strategy.side_processes(made)
    assert [(each.role, each.index) for each in processes] == [("ps", 0), ("ps", 1)]
    assert processes[0].command[1:] == ("-m", "unidist_parameter_server.server")


@pytest.mark.parametrize("line", ["parameter_server=sync", "parameter_server=async:servers=2"])
def test_elastic_jobs_can_have_it(line: str) -> None:
    check_plan(plan(line))


def test_the_strategy_imports_no_framework_and_no_numpy() -> None:
    code = "import sys, unidist_parameter_server.strategy; print({'torch', 'tensorflow', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"
