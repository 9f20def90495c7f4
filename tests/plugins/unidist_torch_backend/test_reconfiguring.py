"""Process groups shrink and grow in the same processes, after `abort` and `kill -9`, and leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from unidist.errors import ConfigurationError, PeerLostError, UsageError
from unidist_torch_backend.process_group import make_group
from unidist_torch_backend.reconfiguring import OwnStore, ReconfigureOptions

SECONDS = timedelta(seconds=20)
SCRIPT = Path(__file__).parent / "_reconfiguring_script.py"
MAX_GROWTH_BYTES = 3 << 20


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the processes of each scenario found."""
    words = [sys.executable, str(SCRIPT), str(tmp_path_factory.mktemp("scenarios"))]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=400, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parallel
@pytest.mark.parametrize("engine", ["shm", "tcp"])
class TestGroups:
    def test_a_group_has_other_members_twenty_times_and_leaves_nothing_behind(
        self, answers: dict[str, Any], engine: str
    ) -> None:
        for found in answers[f"cycles {engine}"]:
            assert isinstance(found, dict), found
            assert set(found["sums"]) == {0.0}
            early, late = found["held"]
            assert late.pop("resident") - early.pop("resident") < MAX_GROWTH_BYTES
            # PyTorch's store may not have closed its last connection yet; what leaks does so ten times in between.
            assert {name for name in late if late[name] > early[name] + 3} == set(), (early, late)
            assert found["after"]["shared maps"] == 0

    def test_an_abort_ends_every_wait_within_a_second(self, answers: dict[str, Any], engine: str) -> None:
        waited, other = answers[f"abort while waiting {engine}"]
        assert isinstance(waited, dict), waited
        assert other == {}
        assert len(waited) == 14
        for way, (kind, seconds) in waited.items():
            assert kind == "PeerLostError", way
            assert seconds < 1, way

    def test_a_process_may_abort_its_default_group_and_make_another(self, answers: dict[str, Any], engine: str) -> None:
        assert answers[f"another process group {engine}"] == [2.0, None, 2.0]

    def test_survivors_of_a_killed_rank_go_on_and_a_newcomer_joins(self, answers: dict[str, Any], engine: str) -> None:
        first, killed, third, newcomer = answers[f"survive {engine}"]
        assert killed is None
        for found in (first, third, newcomer):
            assert isinstance(found, dict), found
            assert found["apart"] < 1e-12
            assert found["alone"] > 1e-3, "without an exchange the weights are others"
            assert found["seconds"] < 2

    def test_a_sharded_replica_goes_on_when_the_other_one_is_killed(self, answers: dict[str, Any], engine: str) -> None:
        first, second, *killed = answers[f"sharded replicas {engine}"]
        assert killed == [None, None]
        for found in (first, second):
            assert isinstance(found, dict), found
            assert found["failed"]
            assert found["apart"] < 1e-12


def test_the_members_are_in_the_order_of_a_sequence_and_find_one_order_for_a_set() -> None:
    stores = [OwnStore() for _ in range(3)]
    handles = [store.handle for store in stores]
    for uuid, given in enumerate([handles, set(handles)]):
        options = ReconfigureOptions(uuid, given)
        places = [stores[number].meet(options, SECONDS) for number in (2, 0, 1)]
        assert sorted(place.rank for place in places) == [0, 1, 2]
        assert {place.size for place in places} == {3}
        if given is handles:
            assert [place.rank for place in places] == [2, 0, 1]
        for place in places:
            place.store.set(str(place.rank), str(place.rank))
        for place in places:
            assert [place.store.get(str(rank)) for rank in range(3)] == [b"0", b"1", b"2"]


def test_a_membership_that_cannot_be_is_refused() -> None:
    own, other = OwnStore(), OwnStore()
    own.meet(ReconfigureOptions(7, [own.handle]), SECONDS)
    for options, words in [
        (ReconfigureOptions(7, [own.handle]), "uuid=7, which is already used"),
        (ReconfigureOptions(8, [other.handle]), "that of this process is not among them"),
        (ReconfigureOptions(8, [own.handle, own.handle]), "a handle twice among 2"),
        (ReconfigureOptions(8, ["gloo:0:1:localhost:1", own.handle]), "'gloo:0:1:localhost:1' is not a handle"),
    ]:
        with pytest.raises(UsageError, match=words):
            own.check(options)


def test_members_that_were_given_other_handles_are_told_so() -> None:
    first, second, third = OwnStore(), OwnStore(), OwnStore()
    first.meet(ReconfigureOptions(1, [first.handle, second.handle]), SECONDS)
    with pytest.raises(ConfigurationError, match="uuid=1 was given 3 handles, and another member 2"):
        second.meet(ReconfigureOptions(1, [first.handle, second.handle, third.handle]), SECONDS)


def test_a_first_member_that_has_ended_is_named() -> None:
    gone, own = OwnStore(), OwnStore()
    handle = gone.handle
    del gone
    with pytest.raises(PeerLostError, match=r"rank 1 of 2 could not reach rank 0 at .* within 0.5 s") as caught:
        own.meet(ReconfigureOptions(1, [handle, own.handle]), timedelta(seconds=0.5))
    assert caught.value.ranks == (0,)


def test_a_group_that_is_formed_later_refuses_operations_until_then() -> None:
    """`init_process_group(enable_reconfigure=True)` of PyTorch 2.14: a process that joins has nobody to connect to."""
    asked = SimpleNamespace(
        store=dist.HashStore(), group_rank=1, group_size=3, timeout=SECONDS, global_ranks_in_group=[], group_id="world",
        enable_reconfigure=True,
    )  # fmt: skip
    group = make_group(asked)
    value = torch.ones(3)
    with pytest.raises(PeerLostError, match=r"no members before the first reconfigure\(\)"):
        group.allreduce([value])
    group.reconfigure(ReconfigureOptions(1, [group.get_reconfigure_handle()]))
    group.allreduce([value]).wait()
    assert (group.rank(), group.size(), value.tolist()) == (0, 1, [1.0] * 3)
    group.shutdown()


def test_own_stores_leave_no_thread_and_no_descriptor_behind() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    OwnStore()  # what PyTorch makes once
    before = held()
    for _ in range(5):
        OwnStore()
    assert held() == before
