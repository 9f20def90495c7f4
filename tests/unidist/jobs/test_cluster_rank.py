"""Processes that somebody else has started become the ranks of a job."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from unidist.errors import ConfigurationError, PeerLostError
from unidist.jobs import ClusterRank, rank_order

_SEC = 60.0


def test_ranks_of_a_node_are_next_to_each_other_and_keep_their_order() -> None:
    ranks = [ClusterRank(node=node, address="127.0.0.1") for node in ("b", "a", "b")]
    try:
        offers = [rank.offer for rank in ranks]
        places = [rank.share(offers).places[0] for rank in ranks]
        assert [place.rank for place in places] == rank_order(offers) == [0, 2, 1]
        assert [(place.node_rank, place.local_rank, place.local_size) for place in places] == [
            (0, 0, 2), (1, 0, 1), (0, 1, 2),
        ]  # fmt: skip
    finally:
        for rank in ranks:
            rank.close()


def test_offers_that_do_not_make_a_job_are_errors() -> None:
    with ClusterRank(address="127.0.0.1") as rank, ClusterRank(address="127.0.0.1") as other:
        for offers in ([other.offer], [rank.offer, rank.offer], [rank.offer, other.offer, other.offer]):
            with pytest.raises(ConfigurationError, match="each process of the job makes one offer"):
                rank.share(offers)
        old = json.dumps({**json.loads(other.offer), "version": "0.0.1"})
        with pytest.raises(ConfigurationError, match=r"but 0\.0\.1 at 127\.0\.0\.1; install the same"):
            rank.share([rank.offer, old])
        with pytest.raises(ConfigurationError, match="is not the offer of a ClusterRank"):
            rank.share([rank.offer, '{"rank": 1}'])


def test_an_address_of_another_host_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"203\.0\.113\.7.* cannot listen there"):
        ClusterRank(address="203.0.113.7")


def test_a_variable_that_tells_the_place_cannot_be_given() -> None:
    with ClusterRank(address="127.0.0.1") as rank, pytest.raises(ConfigurationError, match="UNIDIST_RANK: set by"):  # noqa: SIM117
        with rank.joined([rank.offer], env={"UNIDIST_RANK": "3"}):
            raise AssertionError("the block is not entered")


def test_the_environment_is_as_before_afterwards() -> None:
    before = dict(os.environ)
    descriptors = os.listdir("/proc/self/fd")
    with ClusterRank(address="127.0.0.1") as rank, rank.joined([rank.offer], env={"MY_OWN": "1"}):
        assert (os.environ["UNIDIST_WORLD_SIZE"], os.environ["MY_OWN"]) == ("1", "1")
    assert dict(os.environ) == before
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


@pytest.mark.parallel
@pytest.mark.parametrize(("nodes", "engine"), [(("", ""), "shm"), (("a", "b"), "tcp"), (("a", "b", "a"), "tcp")])
def test_processes_are_ranks_of_one_job_after_another(nodes: Sequence[str], engine: str) -> None:
    """In the last two jobs rank 0 fails, and is killed: the others are told, and can take part in the next job."""
    first, *others = _run(nodes, (_sum, _sum, _fail_on_rank_0, _kill_rank_0))
    done = (len(nodes), engine, sum(range(1, len(nodes) + 1)))
    assert first == [done, done, "ZeroDivisionError: division by zero"]
    for each in others:
        assert each[:2] == [done, done]
        assert re.search("PeerLostError.*rank 0", each[2])
        assert re.search("PeerLostError.*rank 0", each[3])


def _sum() -> tuple[int, str, float]:
    import numpy as np

    from unidist import buffer
    from unidist.runtime import init

    context = init()
    values = np.full(3, context.topology.rank + 1.0)
    whole = buffer.Buffer.of(values)
    context.world.allreduce(whole, whole).wait()
    return context.topology.world_size, context.engine.spec.name, values[0]


def _fail_on_rank_0() -> Any:
    from unidist.runtime import init

    if init().topology.rank == 0:
        return 1 / 0
    return _sum()


def _kill_rank_0() -> Any:
    from unidist.runtime import init

    if init().topology.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return _sum()


def _run(nodes: Sequence[str], functions: Sequence[Any]) -> list[list[Any]]:
    """Run functions, each as a job of its own, in processes that are there for all of them; return what each got."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for node in nodes:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_member, args=(theirs, node, functions))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    told: list[list[Any]] = [[] for _ in nodes]
    try:
        for _ in functions:
            offers = [_receive(pipe) for pipe in pipes]
            for pipe in pipes:
                pipe.send(offers)
            for result, pipe in zip(told, pipes, strict=True):
                try:
                    result.append(_receive(pipe))
                except EOFError:
                    continue  # it was killed
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            pipe.close()
            process.join(_SEC)
            process.kill()
    return told


def _receive(pipe: Connection) -> Any:
    assert pipe.poll(_SEC), "a process said nothing"
    return pipe.recv()


def _member(pipe: Connection, node: str, functions: Sequence[Any]) -> None:
    for function in functions:
        with ClusterRank(node=node, address="127.0.0.1") as rank:
            pipe.send(rank.offer)
            try:
                with rank.joined(pipe.recv()):
                    result = function()
            except (PeerLostError, ZeroDivisionError) as exc:
                result = f"{type(exc).__name__}: {exc}"
            pipe.send(result)
