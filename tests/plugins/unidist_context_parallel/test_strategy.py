"""The strategy `context`: its place in the mesh, and what it refuses before anything starts."""

from __future__ import annotations

import pytest

from unidist.errors import ConfigurationError
from unidist.mesh import REPLICA_AXES, SAMPLE_AXES
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy import Plan
from unidist.strategy.elastic_support import check_plan
from unidist.strategy.plan import build, make_plan


def plan(line: str, ranks: int) -> Plan:
    registry = PluginManager().load().strategies
    return make_plan(build(line, registry), ranks, registry)


def test_ranks_of_a_group_have_the_same_samples_and_average_gradients_with_all() -> None:
    mesh = plan("pipeline=2,context=2,tensor=2", 16).mesh
    assert list(mesh.axes) == ["pipeline", "data", "context", "tensor"]
    assert mesh.group("context", rank=0) == (0, 2)
    assert mesh.group(SAMPLE_AXES, rank=0) == (0, 4)
    assert mesh.group(REPLICA_AXES, rank=0) == (0, 2, 4, 6)
    assert mesh.model_axes == ("pipeline", "tensor"), "the model is whole along context"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("context=0", "at least 1"),
        ("context=2:inputs=src+", "empty name"),
        ("context=2:exchange=star", "Choices: gather, ring, ulysses"),
        ("context=3", "does not divide world_size 4"),
        ("context=2,local_sgd=4", "local_sgd"),
        ("context=2,parameter_server=async", "parameter_server"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(line: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(line, 4)


def test_elastic_jobs_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigurationError, match="2 ranks have the tokens of one sample"):
        check_plan(plan("context=2", 4))
