"""The strategy line of ZeRO: what is checked before any process starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unidist.buffer import HOST, Buffer, DType
from unidist.cost_model.figures import ModelFigures, Workload
from unidist.cost_model.memory import CATEGORIES
from unidist.errors import ConfigurationError
from unidist.runtime.plugin_manager import PluginManager
from unidist.strategy.interface import Plan
from unidist.strategy.plan import build, make_plan
from unidist.testing import ThreadWorld
from unidist_planner.memory.estimate import plain_memory
from unidist_zero.sharding.bucket_buffers import BucketBuffers
from unidist_zero.sharding.shard_groups import groups_of, make_shard_group
from unidist_zero.strategy import Zero


def plan(line: str, size: int = 4) -> Plan:
    registry = PluginManager().load().strategies
    return make_plan(build(line, registry), size, registry)


def test_options_of_the_line() -> None:
    zero, *others = plan("zero=2:bucket_mb=4:whole=true:shard=2,accumulate=3").strategies
    assert zero == Zero(2, bucket_mb=4.0, whole="true", shard=2)
    assert [item.name for item in others] == ["accumulate"], "nobody else owns the gradients"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("zero=4", "1, 2, 3"),
        ("zero", "needs a value"),
        ("zero=1:bucket_mb=0", "above 0"),
        ("zero=1:whole=maybe", "auto, false, true"),
        ("zero=1:shared=maybe", "auto, false, true"),
        ("zero=1:units=blocks.*", "zero=1:units=.*stay where they are; use zero=3"),
        ("zero=3:shared=true:prefetch=2", "zero=3:shared=true:prefetch=2: .* leave out either"),
        ("zero=3:prefetch=-1", "prefetch=-1: give 0 or more"),
        ("zero=1:shard=3", "choices: 1, 2, 4"),
        ("zero=1:shard=0", "does not divide"),
        ("zero=1:stage=2:colour=red", "colour|stage"),
        ("zero=1,data", "'zero' and 'data' both own the gradient exchange"),
        ("zero=1,zero=2", "give it once"),
    ],
)
def test_what_cannot_be_is_refused(line: str, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        plan(line)


def test_the_estimate_says_where_state_is_offloaded_to() -> None:
    workload = Workload(ModelFigures(1000), precision="bf16")

    def places(line: str) -> dict[str, str]:
        strategy = plan(line).strategies[0]
        assert isinstance(strategy, Zero)
        memory = strategy.estimate(plain_memory(workload), workload, plan(line))
        return {name: memory.holding(name).place for name in CATEGORIES}

    state = ("master", "optimizer")
    assert {name for name, place in places("zero=2:offload=host").items() if place == "host"} == {*state}
    assert {name for name, place in places("zero=3:offload=host").items() if place == "host"} == {*state, "parameters"}
    assert {name for name, place in places("zero=3:offload=/tmp").items() if place == "file"} == {*state}


def test_stage_3_alone_must_see_the_model() -> None:
    assert [Zero(stage).changes_model for stage in (1, 2, 3)] == [False, False, True]


def test_the_strategy_imports_no_framework() -> None:
    code = "import sys, unidist_zero.strategy; print(sorted({'torch', 'tensorflow', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_neighbours_share_and_equal_places_are_replicas() -> None:
    assert [list(group) for group in groups_of(5, 8, 4)] == [[4, 5, 6, 7], [1, 5]]
    with ThreadWorld(4) as world:
        shard_groups = world.run(lambda communicator: make_shard_group(communicator, 2))
        members = [
            (shard_group.communicator.members, shard_group.replicas.members if shard_group.replicas else None)
            for shard_group in shard_groups
        ]
    assert members == [((0, 1), (0, 2)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((2, 3), (1, 3))]
    with ThreadWorld(2) as world:
        assert all(
            shard_group.replicas is None
            for shard_group in world.run(lambda communicator: make_shard_group(communicator, 2))
        )


def test_bucket_memories_are_used_again_and_few() -> None:
    made = []

    def allocate(nbytes: int) -> Buffer:
        made.append(nbytes)
        return Buffer.allocate(nbytes, DType.UINT8)

    buffers = BucketBuffers(allocate, num_kept=2)
    for _ in range(3):
        pooled, memory = buffers.acquire(100)
        assert memory.count == 100
        assert memory.memory == HOST
        buffers.release(pooled)
    assert made == [100]
    first, second, third = (buffers.acquire(nbytes)[0] for nbytes in (60, 200, 300))  # more than are kept
    assert made == [100, 200, 300]
    assert buffers.exhausted
    for pooled in (first, second, third):
        buffers.release(pooled)
    assert buffers.nbytes == 500, "the smallest went"
    assert buffers.acquire(250)[0] is third
