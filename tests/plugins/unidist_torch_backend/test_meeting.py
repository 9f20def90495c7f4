"""Who may be in a process group, and where its members are."""

from __future__ import annotations

import dataclasses
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from unidist.control.messages import RELEASE
from unidist.errors import ConfigurationError, StalledError
from unidist.topology import Topology
from unidist_torch_backend import meeting
from unidist_torch_backend.meeting import GroupFacts, GroupJob, meet, own_job, topology_of

SECONDS = timedelta(seconds=30)


def meet_all(
    folder: Path,
    changes: dict[int, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...] = (3, 3, 3),
) -> list[Any]:
    """Let three threads meet, each a rank; return the meeting or the error of each. `changes`: what ranks tell."""
    plain = meeting._own_member
    told = threading.local()
    monkeypatch.setattr(meeting, "_own_member", lambda *args: dataclasses.replace(plain(*args), **told.changes))
    found: list[Any] = [None] * 3

    def run(rank: int) -> None:
        told.changes = changes.get(rank, {})
        try:
            store = dist.FileStore(str(folder / "store"), 3)
            found[rank] = meet(store, rank, sizes[rank], SECONDS, own_job(is_world=True))
        except Exception as exc:
            found[rank] = exc

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_hosts_are_numbered_in_the_order_of_their_first_rank() -> None:
    hosts = ["b", "a", "b", "c", "a"]
    assert topology_of(hosts, 0) == Topology(0, 5, 0, 2, 0, 3)
    assert topology_of(hosts, 2) == Topology(2, 5, 1, 2, 0, 3)
    assert topology_of(hosts, 3) == Topology(3, 5, 0, 1, 2, 3)


def test_members_know_each_other_and_one_secret(tmp_path: Path) -> None:
    found: list[GroupFacts] = []
    threads = [
        threading.Thread(
            target=lambda rank=rank: found.append(
                meet(dist.FileStore(str(tmp_path / "store"), 2), rank, 2, SECONDS, own_job(is_world=True))
            )
        )
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({each.secret for each in found}) == 1
    assert sorted(each.topology.rank for each in found) == [0, 1]
    assert all(each.topology.single_host for each in found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": "9.9"}, f"different versions of unidist (rank 0: {RELEASE}, rank 1: 9.9, rank 2: {RELEASE})"),
        ({"job": "torchrun x"}, "not one job (rank 0: no launcher, rank 1: torchrun x, rank 2: no launcher)"),
    ],
)
def test_a_stranger_is_one_line_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], words: str
) -> None:
    for variable in ("UNIDIST_RANK", "TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    for error in meet_all(tmp_path, {1: change}, monkeypatch):
        assert isinstance(error, ConfigurationError)
        assert words in str(error)
        assert "\n" not in str(error)


@pytest.mark.parametrize("sizes", [(3, 4, 3), (4, 3, 3), (3, 3, 4)])
def test_sizes_that_differ_are_one_line_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    for variable in ("UNIDIST_RANK", "TORCHELASTIC_RUN_ID", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    begin = time.monotonic()
    for rank, error in enumerate(meet_all(tmp_path, {}, monkeypatch, sizes)):
        assert isinstance(error, ConfigurationError)
        assert f"rank {rank}: the group was asked for with world_size={sizes[rank]}" in str(error)
        assert "\n" not in str(error)
    assert time.monotonic() - begin < SECONDS.total_seconds(), "nobody waits for a rank that cannot come"


def test_a_rank_beyond_the_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="rank=2 with world_size=2: ranks are 0 to 1"):
        meet(dist.FileStore(str(tmp_path / "store"), 2), 2, 2, SECONDS, GroupJob())


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 3)
    store.set("meeting/1/0/2", b"{}".hex())
    with pytest.raises(StalledError, match=r"rank 0 waited 0.2 s for rank\(s\) 1 of a process group of 3"):
        meet(store, 0, 3, timedelta(seconds=0.2), own_job(is_world=True))


def test_a_rank_that_is_taken_is_refused(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    store.add("meetings/0", 1)
    store.set("member/0", "some host/77")
    with pytest.raises(ConfigurationError, match="rank 0 is taken in this store, by process 77"):
        meet(store, 0, 2, timedelta(seconds=1), own_job(is_world=True))


def test_a_world_larger_than_the_job_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNIDIST_RANK", "0")
    monkeypatch.setenv("UNIDIST_WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"world_size=3, but unidist started 2 process\(es\)"):
        meet(dist.FileStore(str(tmp_path / "store"), 3), 0, 3, SECONDS, own_job(is_world=True))
