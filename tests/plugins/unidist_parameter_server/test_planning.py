"""What parameter servers cost: pushes and fetches by the busiest link, and the state that workers do not hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from unidist.cost_model import Cluster, Efficiency, Link, SearchProblem
from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import StrategySpec
from unidist.strategy.plan import build, make_plan
from unidist_planner.memory.transformer import Transformer
from unidist_planner.step_time.prediction import Prediction, predict
from unidist_planner.step_time.transformer import TransformerWork

WORK = TransformerWork(Transformer(8, 1024, 8000, 512, heads=16), batch=256, precision="fp32")
HOSTS = Cluster(
    flops=1e15, ranks_per_host=1, inside=Link(0, 1e12), between=Link(0, 1e9), efficiency_between=Efficiency()
)
"""Hosts of one rank that compute in no time."""
SLOW = replace(HOSTS, flops=1e12)
PLUGINS = PluginManager().load()


def predicted(line: str, ranks: int, cluster: Cluster = HOSTS) -> Prediction:
    registry = PLUGINS.registry(StrategySpec)
    return predict(
        line, make_plan(build(line, registry), ranks, registry), SearchProblem(WORK, cluster, ranks, PLUGINS)
    )


def seconds(found: Prediction, *names: str) -> float:
    return sum(part.seconds for part in found.parts if part.name in names)


MODEL_SECONDS = WORK.workload(1).model.parameters * 4 / 1e9
"""Of all gradients over the link of a host."""


@pytest.mark.parametrize(
    ("servers", "times"),
    [
        (8, 2 * 7 / 8),  # one on each host: as much as a ring, 7/8 out and in
        (4, 2 * 7 / 4),  # those with a server receive 7 times a quarter
        (1, 2 * 7),
        (16, 2 * 7 / 8),
        (12, 2 * 7 / 6),  # two on the fullest of them: a sixth of all
    ],
)
def test_the_busiest_link_bounds_pushes_and_fetches(servers: int, times: float) -> None:
    found = predicted(f"parameter_server=sync:servers={servers}", 8)
    assert seconds(found, "push", "fetch") == pytest.approx(times * MODEL_SECONDS)


def test_a_server_on_each_host_is_as_fast_as_a_ring() -> None:
    ring = seconds(predicted("data=8:overlap=false", 8, replace(HOSTS, overlap=0.0)), "gradients")
    assert seconds(predicted("parameter_server=sync:servers=8", 8), "push", "fetch") == pytest.approx(ring)


def test_ranks_of_a_host_share_its_link() -> None:
    two = replace(HOSTS, ranks_per_host=2)
    one, shared = predicted("parameter_server=sync:servers=4", 4), predicted("parameter_server=sync:servers=4", 8, two)
    assert seconds(shared, "push") == pytest.approx(2 * seconds(one, "push"))


def test_a_copy_of_each_push_doubles_it() -> None:
    plain, copied = (predicted(f"parameter_server=sync:servers=4{option}", 8) for option in ("", ":replicas=1"))
    assert seconds(copied, "push") == pytest.approx(2 * seconds(plain, "push"))
    assert seconds(copied, "fetch") == pytest.approx(seconds(plain, "fetch"))


def test_asynchronous_workers_wait_for_their_own_messages_only_while_others_compute() -> None:
    together = predicted("parameter_server=sync:servers=1", 8, SLOW)
    alone = predicted("parameter_server=async:servers=1", 8, SLOW)
    assert alone.seconds < together.seconds
    own = 2 * 7 / 8 * MODEL_SECONDS
    assert seconds(alone, "push", "fetch") >= own * 0.99
    # with no computing time, only the link of the server counts
    assert predicted("parameter_server=async:servers=1", 8).seconds == pytest.approx(
        predicted("parameter_server=sync:servers=1", 8).seconds, rel=0.02
    )
    every = predicted("parameter_server=async:servers=1:push_every=4:fetch_every=4", 8)
    assert seconds(every, "push", "fetch") == pytest.approx(2 * 7 / 4 * MODEL_SECONDS, rel=0.02)


def test_staleness_0_is_synchronous() -> None:
    lines = ("parameter_server=async:staleness=0:servers=2", "parameter_server=sync:servers=2")
    assert len({predicted(line, 8, SLOW).seconds for line in lines}) == 1


def test_shared_memory_is_of_one_host() -> None:
    whole = replace(HOSTS, ranks_per_host=8, inside=Link(0, 1e9))
    assert seconds(predicted("parameter_server=sync", 8, whole), "push", "fetch") == pytest.approx(2 * MODEL_SECONDS)
    with pytest.raises(ConfigurationError, match=r"8 workers are on 8 hosts of 1 ranks\. Give servers=N"):
        predicted("parameter_server=sync", 8)


def test_servers_have_the_optimizer_s_state() -> None:
    held = {line: predicted(line, 8).estimate for line in ("data=8", "parameter_server=sync:servers=2")}
    model = WORK.workload(1).model.parameters
    assert held["data=8"].bytes_of("optimizer") == 8 * model
    assert held["parameter_server=sync:servers=2"].bytes_of("optimizer") == 0
    delta = predicted("parameter_server=async:push=delta:servers=2", 8).estimate
    assert delta.bytes_of("optimizer") == 8 * model  # the worker's own optimizer
    shared = predicted("parameter_server=sync", 8, replace(HOSTS, ranks_per_host=8)).estimate
    assert shared.bytes_of("optimizer") == pytest.approx(model)
    assert shared.bytes_of("store that workers share") == pytest.approx(4 * model / 8, rel=1e-3)
