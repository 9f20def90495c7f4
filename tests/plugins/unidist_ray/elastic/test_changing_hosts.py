"""Nodes of Ray's that seem to come and go."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="ray is not installed; `make test-integrations` has it")

import itertools

import ray

from unidist.errors import ConfigurationError
from unidist_ray.elastic.changing_hosts import ChangingHosts


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Five nodes with room for two ranks each."""
    found: list[dict[str, object]] = [
        {"Alive": True, "Resources": {"CPU": 2.0}, "NodeManagerAddress": f"10.0.0.{index}", "NodeID": f"n{index}"}
        for index in range(5)
    ]
    monkeypatch.setattr(ray, "nodes", lambda: found)
    return found


def test_the_number_of_nodes_moves_between_the_limits_by_one_at_a_time() -> None:
    discovery = ChangingHosts(min_hosts=2, max_hosts=4, change_frequency_s=0, verbose=False, seed=1)
    counts = [5]
    for _ in range(100):
        shown = discovery.find_available_hosts_and_slots()
        assert set(shown.values()) == {2}
        counts.append(len(shown))
    assert {abs(after - before) for before, after in itertools.pairwise(counts)} <= {0, 1}
    assert set(counts) == {2, 3, 4, 5}
    assert set(counts[10:]) == {2, 3, 4}


def test_nothing_changes_before_its_time() -> None:
    discovery = ChangingHosts(min_hosts=1, max_hosts=2, change_frequency_s=3600)
    assert [len(discovery.find_available_hosts_and_slots()) for _ in range(3)] == [5, 5, 5]


def test_a_hidden_node_that_is_gone_is_forgotten(nodes: list[dict[str, object]]) -> None:
    discovery = ChangingHosts(min_hosts=1, max_hosts=1, change_frequency_s=0, verbose=False)
    for _ in range(4):
        discovery.find_available_hosts_and_slots()
    del nodes[1:]
    assert len(discovery.find_available_hosts_and_slots()) == 1


def test_limits_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ConfigurationError, match="min_hosts <= max_hosts"):
        ChangingHosts(3, 2, 1.0)
    with pytest.raises(ConfigurationError, match="kills no node"):
        ChangingHosts(1, 2, 1.0, _graceful=False)
