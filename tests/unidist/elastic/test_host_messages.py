"""Messages about hosts: what scripts of Horovod read, override and send themselves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_job import ElasticJob

from unidist.elastic import (
    HostsUpdatedInterrupt,
    HostUpdateResult,
    ObjectState,
    State,
    WorkerNotificationManager,
    run,
    run_fn,
)
from unidist.errors import HorovodInternalError
from unidist.runtime import context

added, removed, mixed = HostUpdateResult.added, HostUpdateResult.removed, HostUpdateResult.mixed


@pytest.fixture
def alone() -> Iterator[None]:
    context.init()
    yield
    context.shutdown()


@pytest.mark.parametrize(
    ("messages", "skips_sync"),
    [([(1, added)], False), ([(1, removed)], True), ([(1, removed), (2, added)], False), ([(3, mixed)], False)],
)
def test_a_message_interrupts_the_next_commit_and_that_alone(
    alone: None, messages: list[tuple[int, HostUpdateResult]], skips_sync: bool
) -> None:
    state = ObjectState(step=0)
    for message in messages:
        state.on_hosts_updated(*message)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skips_sync
    state.commit()
    state.on_hosts_updated(messages[-1][0], added)  # not later than the last
    state.commit()


def test_a_reset_forgets_messages(alone: None) -> None:
    state = ObjectState(step=0)
    state.on_hosts_updated(1, added)
    assert state._host_messages.get() == (1, added)
    state.on_hosts_updated(2, added)
    state.on_reset()
    assert state._host_messages.empty()
    state.check_host_updates()


def test_a_state_is_a_listener_while_its_function_runs_and_its_interrupt_calls_the_function_again(alone: None) -> None:
    from unidist.elastic import notification_manager

    state, entered = ObjectState(step=0), []

    @run
    def train(state: ObjectState) -> int:
        entered.append(state.step)
        if len(entered) == 1:
            state.step = 1
            notification_manager.handle_hosts_updated(time.time(), removed)
            state.commit()
        return state.step

    assert train(state) == 1
    assert entered == [0, 1]
    notification_manager.handle_hosts_updated(time.time() + 1, added)
    assert state._host_messages.empty()


def test_a_manager_has_listeners_of_any_kind() -> None:
    class Listener:
        def __init__(self) -> None:
            self.heard: list[tuple[float, HostUpdateResult]] = []

        def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
            self.heard.append((timestamp, update_res))

    manager, listener = WorkerNotificationManager(), Listener()
    manager.init()
    manager.register_listener(listener)
    manager.handle_hosts_updated(1, added)
    manager.remove_listener(listener)
    manager.handle_hosts_updated(2, added)
    assert listener.heard == [(1, added)]
    with pytest.raises(KeyError):
        manager.remove_listener(listener)


def test_a_state_of_ones_own_gives_horovods_functions_and_defines_what_it_needs(alone: None) -> None:
    class Own(State):
        def __init__(self) -> None:
            super().__init__(bcast_object=lambda value: value, get_rank=lambda: 5)

        def save(self) -> None:
            self.saved = (self._rank(), self._bcast_object("x"))

    own = Own()
    own.commit()
    assert own.saved == (5, "x")
    with pytest.raises(NotImplementedError, match=r"Own is an elastic state without sync\(\)"):
        own.sync()
    state = ObjectState(lambda value: {**value, "step": 7}, lambda: 0, step=1)
    state.sync()
    assert (state.step, state._rank()) == (7, 0)


def test_a_function_with_a_reset_of_its_own_goes_on_after_an_error(alone: None) -> None:
    state, done = ObjectState(step=0), []

    def train(state: ObjectState) -> int:
        done.append("train")
        if len(done) == 1:
            state.step = 5
            raise HorovodInternalError("lost")
        return state.step

    assert run_fn(train, lambda: done.append("reset"))(state) == 0
    assert done == ["train", "reset", "train"]


# In an elastic job

STATES = """
import queue
from unidist.elastic import HostUpdateResult, HostsUpdatedInterrupt, ObjectState, run

class Told(ObjectState):
    def on_hosts_updated(self, timestamp, update_res):
        say("told", update_res.name, int(timestamp > 1e9))
        {on_told}

class Asking(Told):
    # Horovod's own check_host_updates: it reads the messages, and takes those of rank 0
    def check_host_updates(self):
        last = before = self._last_updated_timestamp
        update = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, found = self._host_messages.get()
            if timestamp > last:
                last = timestamp
                update |= found
        before, self._last_updated_timestamp, update = self._bcast_object((before, last, update))
        if self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(update == HostUpdateResult.removed)

from unidist import elastic
elastic.ObjectState = {kind}
"""
PASS_ON = "super().on_hosts_updated(timestamp, update_res)"


def script(kind: str, on_told: str) -> str:
    import elastic_job

    return elastic_job.script(setup=STATES.format(kind=kind, on_told=on_told))


@pytest.mark.parallel
@pytest.mark.parametrize("kind", ["Told", "Asking"])
def test_states_are_told_of_ranks_that_join_and_leave_and_may_decide_themselves(kind: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script(kind, PASS_ON))
    with ElasticJob.start(tmp_path, ["-np", "3", "--min-np", "1"], ["script.py", "100000", "0.02"]) as job:
        job.wait_for(r"step 3 \d .*")
        os.kill(job.pid(2, 3), signal.SIGKILL)
        job.wait_for(r"told added 1")
        job.wait_for(r"enter 0 3 [1-9]\d* \d+")
        os.kill(job.pid(1, 3), signal.SIGTERM)
        job.wait_for(r"told removed 1")
        job.wait_for(r"enter 0 2 [1-9]\d* \d+")
        (tmp_path / "stop").touch()
        assert job.end(seconds=60) == 0, job.lines
    sizes = [event["world_size"] for event in job.events("generation")]
    assert sizes[:3] == [3, 2, 3]
    assert 2 in sizes[3:]


@pytest.mark.parallel
def test_a_state_that_keeps_the_messages_to_itself_keeps_the_world(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script("Told", "pass"))
    with ElasticJob.start(tmp_path, ["-np", "2", "--min-np", "1"], ["script.py", "100000", "0.02"]) as job:
        job.wait_for(r"step 3 \d .*")
        os.kill(job.pid(1, 2), signal.SIGKILL)
        job.wait_for(r"told added 1")
        before = int(job.said(r"step (\d+) 0 .*")[-1][0])
        job.wait_for(rf"step {before + 20} 0 .*")
        (tmp_path / "stop").touch()
        assert job.end(seconds=60) == 0, job.lines
    assert [event["world_size"] for event in job.events("generation")] == [2, 1]
