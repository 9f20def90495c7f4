"""Random programs of operations over any engine, found by hypothesis, and random moments at which a rank is lost."""

from __future__ import annotations

import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unidist.communicator import Communicator, ReduceOp
from unidist.errors import PeerLostError
from unidist.testing import _rank_side
from unidist.testing.cases.failure import Connects
from unidist.testing.cases.stress import COUNTS, DTYPES, KINDS, NUM_GROUPS, Operation, run_program

_LARGE = (1_000_003,)
_CASE = timedelta(seconds=120)

operations = st.builds(
    Operation,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(list(ReduceOp)),
    count=st.sampled_from(COUNTS + _LARGE),
    group=st.integers(0, NUM_GROUPS - 1),
    seed=st.integers(0, 1000),
)


def check_programs(get_pool: Callable[[int], Any], engine: str, *, sizes: tuple[int, ...], examples: int) -> None:
    """Run random programs over an engine; each gives numpy's results.

    Args:
        get_pool: returns a pool of so many ranks.
        engine: its name.
        sizes: numbers of ranks.
        examples: how many programs.
    """

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None)
    @given(
        size=st.sampled_from(sizes),
        program=st.lists(operations, min_size=1, max_size=25),
        seed=st.integers(0, 1000),
    )
    def check(size: int, program: list[Operation], seed: int) -> None:
        connector = _rank_side.EngineConnector(engine, secrets.token_hex(4), _CASE / 3)
        get_pool(size).run(_rank_side.run_connected, (connector, run_program, (program, seed)), timeout=_CASE)

    check()


def check_losses(
    get_pool: Callable[[int], Any],
    engine: str,
    *,
    sizes: tuple[int, ...],
    examples: int,
    aborts: bool = True,
    leaves_nothing: bool = True,
    bound_sec: float = 30.0,
) -> None:
    """Lose a rank at a random moment of a random program: all others raise PeerLostError before their time is up.

    Args:
        get_pool: returns a pool of so many ranks.
        engine: its name.
        sizes: numbers of ranks, two or more.
        examples: how many losses.
        aborts: the rank may also abort, which its peers notice; else it is always killed.
        leaves_nothing: the others hold nothing of the engine's afterwards.
        bound_sec: longest time until the others notice.
    """

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None)
    @given(
        size=st.sampled_from(sizes),
        program=st.lists(operations, min_size=3, max_size=12),
        victim=st.integers(0, min(sizes) - 1),
        delay_ms=st.integers(0, 400),
        kills=st.booleans() if aborts else st.just(True),
    )
    def check(size: int, program: list[Operation], victim: int, delay_ms: int, kills: bool) -> None:
        connector = _rank_side.EngineConnector(engine, secrets.token_hex(4), _CASE / 3)
        arguments = (program, victim, delay_ms, kills)
        if leaves_nothing:
            ends = get_pool(size).run(_rank_side.run_connecting, (connector, _lose, arguments), timeout=_CASE)
        else:
            ends = get_pool(size).run(_lose, (connector, *arguments), timeout=_CASE)
        lost = ends[victim]
        late = {rank: end - lost for rank, end in enumerate(ends) if end - lost > bound_sec}
        assert not late, f"seconds after the loss of rank {victim}, by rank: {late}"

    check()


def _lose(connects: Connects, program: list[Operation], victim: int, delay_ms: int, kills: bool) -> float:
    """Run the program again and again until a rank is lost; return when it was, or when this rank noticed."""
    is_victim = int(os.environ["UNIDIST_RANK"]) == victim
    if is_victim and kills:
        child = os.fork()  # this process stays, to tell the time
        if child == 0:
            with suppress(BaseException):
                _repeat(connects.connect("loss"), program, delay_ms, lambda _: os.kill(os.getpid(), signal.SIGKILL))
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the victim ended with status {status}"
        return time.monotonic()
    communicator = connects.connect("loss")
    try:
        end = (lambda world: world.abort("chance")) if is_victim else None
        return _repeat(communicator, program, delay_ms, end)
    finally:
        connects.close(communicator)


def _repeat(
    world: Communicator, program: list[Operation], delay_ms: int, end: Callable[[Communicator], None] | None
) -> float:
    world.barrier().wait()
    ended = threading.Timer(delay_ms / 1000, end, (world,)) if end else None
    if ended is not None:
        ended.start()
    deadline = time.monotonic() + 60
    number = 0
    try:
        while time.monotonic() < deadline:
            run_program(world, program, number)
            number += 1
            world.barrier().wait()  # also where the program says nothing to this rank
    except PeerLostError:
        return time.monotonic()
    finally:
        if ended is not None:
            ended.join()
    raise AssertionError(f"rank {world.rank} noticed nothing in {number} programs")
