"""TF_CONFIG, as TensorFlow's tools read it."""

from __future__ import annotations

import json

import pytest

from unidist.jobs import tf_config
from unidist.launcher import SideProcess

CLUSTER = tf_config.TfCluster(("h1:1", "h2:2"), ("h1:3",))


def test_ranks_are_workers_and_worker_0_acts_as_chief() -> None:
    found = json.loads(CLUSTER.of_rank(1)["TF_CONFIG"])
    assert found["cluster"] == {"worker": ["h1:1", "h2:2"], "ps": ["h1:3"]}
    assert found["task"] == {"type": "worker", "index": 1}


@pytest.mark.parametrize(("role", "index"), [("ps", 0), ("evaluator", 0), ("data", 3)])
def test_processes_beside_the_ranks_have_tasks_of_their_role(role: str, index: int) -> None:
    found = json.loads(CLUSTER.of(SideProcess(("true",), role, index))["TF_CONFIG"])
    assert found["task"] == {"type": role, "index": index}
    assert set(found["cluster"]) == {"worker", "ps"}


def test_servers_are_in_the_order_of_their_index() -> None:
    processes = [SideProcess(("true",), role, index) for role, index in (("ps", 1), ("evaluator", 0), ("ps", 0))]
    assert [each.index for each in tf_config.servers_of(processes)] == [0, 1]


@pytest.mark.parametrize(
    ("text", "is_given"),
    [
        ("", False),
        ("{", True),
        ('{"cluster": {}, "environment": "cloud"}', True),
        ("unidist", True),
        ('["unidist"]', True),
        (CLUSTER.of_rank(0)["TF_CONFIG"], False),
    ],
)
def test_what_somebody_else_has_set_is_told_from_ours(text: str, is_given: bool) -> None:
    assert tf_config.is_given({"TF_CONFIG": text}) is is_given
    assert tf_config.is_ours({"TF_CONFIG": text}) is (text == CLUSTER.of_rank(0)["TF_CONFIG"])


def test_tensorflow_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    resolvers = pytest.importorskip("tensorflow").distribute.cluster_resolver
    monkeypatch.setenv("TF_CONFIG", CLUSTER.of_rank(1)["TF_CONFIG"])
    found = resolvers.TFConfigClusterResolver()
    assert found.cluster_spec().as_dict() == {"worker": ["h1:1", "h2:2"], "ps": ["h1:3"]}
    assert (found.task_type, found.task_id) == ("worker", 1)
