"""Ranks that wait for each other all raise; ranks that compute are waited for.

Errors say who waits in what. Every engine, real processes. That a rank has left is for the engine to notice.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import pytest

from unidist.testing.fixtures import RankPoolFactory

pytest.importorskip("torch", reason="the programs are in PyTorch")
sys.path.insert(0, str(Path(__file__).parent))  # the ranks get this path too

from _deadlocks import ends

pytestmark = pytest.mark.parallel
LIMIT = timedelta(seconds=120)
ENGINES = ("shm", "gloo", "horovod")


@pytest.mark.parametrize("engine", [*ENGINES, "sample-sockets"])  # the last one is a third party's
@pytest.mark.parametrize("program", ["other names", "name and collective", "both receive"])
def test_every_rank_raises_and_says_who_waits_in_what(rank_pool: RankPoolFactory, engine: str, program: str) -> None:
    pytest.importorskip({"horovod": "horovod", "sample-sockets": "unidist_sample"}.get(engine, "torch"))
    found = rank_pool(2).run(ends, (program, engine), timeout=LIMIT)
    for kind, text, _ in found:
        assert kind == "DeadlockError", text
        lines = text.splitlines()
        assert lines[1].startswith("  rank 0 waits in ")
        assert lines[2].startswith("  rank 1 waits in ")
        assert "_deadlocks.py" in lines[1], "the line of the script"
    first, second = found[0][1].splitlines()[1:3]
    if program == "both receive":
        assert "recv from rank 1" in first
        assert "recv from rank 0" in second
    else:
        assert "allreduce 'loss'" in first
        assert ("allreduce 'accuracy'" if program == "other names" else "barrier") in second


@pytest.mark.soak
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("program", ["other names", "both receive", "one ends"])
def test_they_raise_within_five_seconds(rank_pool: RankPoolFactory, engine: str, program: str) -> None:
    """On a machine that has nothing else to do."""
    if engine == "horovod":
        pytest.importorskip("horovod")
    assert max(seconds for _, _, seconds in rank_pool(2).run(ends, (program, engine), timeout=LIMIT)) < 5


@pytest.mark.parametrize(
    ("program", "call"),
    [
        ("optimizer state", "optimizer.state_dict()"),
        ("model state", "model.state_dict()"),
        ("evaluation", "a pass through 0"),
        ("save", "ud.save()"),
    ],
)
def test_a_collective_call_on_one_rank_is_named(rank_pool: RankPoolFactory, program: str, call: str) -> None:
    for kind, text, _ in rank_pool(2).run(ends, (program, "shm"), timeout=LIMIT):
        assert kind == "DeadlockError", text
        assert f"rank 0 waits in {call}" in text
        assert text.endswith(f"Every rank must make this call in its turn: {call}.")


def test_the_ranks_beside_a_deadlock_end_too(rank_pool: RankPoolFactory) -> None:
    """Ranks 0 and 1 wait for each other; rank 2 has ended its part and waits in `shutdown` for nobody."""
    found = rank_pool(3).run(ends, ("both receive", "shm"), timeout=LIMIT)
    assert [kind for kind, _, _ in found] in (
        ["DeadlockError", "DeadlockError", ""],
        ["PeerLostError", "PeerLostError", ""],
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_has_left_is_not_waited_for(rank_pool: RankPoolFactory, engine: str) -> None:
    if engine == "horovod":
        pytest.importorskip("horovod")
    (kind, text, _), other = rank_pool(2).run(ends, ("one ends", engine), timeout=LIMIT)
    assert kind in ("PeerLostError", "DeadlockError"), text
    assert other[0] == ""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_that_computes_is_waited_for(rank_pool: RankPoolFactory, engine: str) -> None:
    if engine == "horovod":
        pytest.importorskip("horovod")
    found = rank_pool(2).run(ends, ("one computes", engine), timeout=LIMIT)
    assert [kind for kind, _, _ in found] == ["", ""]


@pytest.mark.parametrize("engine", ENGINES)
def test_operations_under_way_are_no_deadlock(rank_pool: RankPoolFactory, engine: str) -> None:
    if engine == "horovod":
        pytest.importorskip("horovod")
    assert [kind for kind, _, _ in rank_pool(3).run(ends, ("large", engine), timeout=LIMIT)] == ["", "", ""]
