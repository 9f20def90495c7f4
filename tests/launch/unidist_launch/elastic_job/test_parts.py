"""The pure parts of the elastic launcher: slots, patience, options, discovery, what the user is told."""

from __future__ import annotations

import json
import re
import selectors
import time
from pathlib import Path
from typing import Never

import pytest

from unidist.errors import ConfigurationError
from unidist.jobs import sweep as process_sweep
from unidist.launcher import Host
from unidist.settings.environment import Settings
from unidist_launch.elastic_job.discovery import Discovery, parse
from unidist_launch.elastic_job.hosts import ElasticHost, ElasticHosts
from unidist_launch.elastic_job.patience import Patience
from unidist_launch.elastic_job.report import event_line
from unidist_launch.elastic_job.slots import MAX_FAILURES, Slots
from unidist_launch.observation.event_log import EventLog
from unidist_launch.options import elastic_options
from unidist_launch.remote.failure import RankExit

NONE = {
    "min_np": None,
    "max_np": None,
    "host_discovery_script": None,
    "slots_per_host": None,
    "elastic_timeout": None,
    "reset_limit": None,
    "fallback_strategy": None,
    "blacklist_cooldown_range": (),
    "step_timeout": None,
    "spares": None,
    "event_log": None,
    "state_dir": None,
    "orphan_timeout": None,
    "checkpoint_dir": None,
    "checkpoint_interval": None,
    "keep_last": None,
}


def test_a_slot_is_used_again_at_once_then_after_pauses_and_then_never() -> None:
    slots = Slots()
    slots.offer([Host("h1", 1), Host("h2", 1)])
    now, pauses = 100.0, []
    for number in range(MAX_FAILURES):
        (slot, *_) = slots.free(now, 2)
        assert slot.host == "h1"
        slot.worker = number
        slots.failed(number, now, was_useful=False)
        pauses.append(slot.free_at - now)
        now = slot.free_at
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert [slot.host for slot in slots.free(now + 1000, 2)] == ["h2"]
    assert slots.num_usable == 1


def test_a_useful_worker_clears_the_count_of_its_slot() -> None:
    slots = Slots((2.0, 3.0))
    slots.offer([Host("h", 1)])
    for number, useful, pause in ((0, False, 2.0), (1, False, 3.0), (2, True, 2.0)):
        (slot,) = slots.free(1000.0 * number, 1)
        slot.worker = number
        slots.failed(number, 1000.0 * number, was_useful=useful)
        assert slot.free_at - 1000.0 * number == pause


def test_spare_slots_are_used_last_and_do_not_count_as_offered() -> None:
    slots = Slots(num_spare=1)
    slots.offer([Host("h1", 2), Host("h2", 1), Host("gone", 0)])
    assert [(slot.host, slot.is_spare) for slot in slots.free(0.0, 9)] == [
        ("h1", False), ("h1", False), ("h2", False), ("h1", True), ("h2", True)
    ]  # fmt: skip
    assert (slots.num_on("h1"), slots.num_usable, slots.num_spare) == (2, 3, 2)


def test_a_member_in_a_spare_slot_changes_places_with_one_that_stands_by() -> None:
    slots = Slots(num_spare=1)
    slots.offer([Host("h", 2)])
    for number, slot in enumerate(slots.free(0.0, 3)):
        slot.worker = number
    slots.settle([0, 1])
    assert [slot.worker for slot in slots._slots] == [0, 1, 2]
    slots.failed(0, 0.0, was_useful=False)
    slots.settle([1, 2])
    assert [slot.worker for slot in slots._slots] == [2, 1, None]
    (free,) = slots.free(0.0, 3)
    assert free.is_spare
    free.worker = 3
    assert slots.num_without([1, 2]) == 1
    assert slots.offer([Host("h", 1)]) == [1]
    assert slots.slot_of(3) is free


def test_slots_that_hosts_take_back_name_their_workers_and_come_back_as_they_were() -> None:
    slots = Slots()
    slots.offer([Host("h", 3)])
    for number, slot in enumerate(slots.free(0.0, 3)):
        slot.worker = number
    assert slots.offer([Host("h", 1)]) == [1, 2]
    assert (slots.num_running, slots.num_usable) == (1, 1)
    slots.vacated(1, 5.0, pause=30.0)
    slots.offer([Host("h", 2)])
    assert slots.free(6.0, 4) == []
    assert [slot.number for slot in slots.free(7.0, 4)] == [1]


def test_a_slot_that_is_offered_again_before_its_process_has_ended_pauses_shortly() -> None:
    slots = Slots()
    slots.offer([Host("h", 2)])
    for number, slot in enumerate(slots.free(0.0, 2)):
        slot.worker = number
    assert slots.offer([Host("h", 1)]) == [1]
    assert slots.offer([Host("h", 2)]) == []  # again, while worker 1 still leaves
    slots.vacated(1, 5.0, pause=30.0)
    assert [slot.number for slot in slots.free(7.0, 2)] == [1]
    slots.free(7.0, 2)[0].worker = 2
    slots.vacated(2, 8.0, pause=30.0)  # this one has left by itself
    assert slots.free(20.0, 2) == []


def test_no_more_workers_than_the_most() -> None:
    slots = Slots()
    slots.offer([Host("h", 8)])
    assert len(slots.free(0.0, 3)) == 3


def end(number: int) -> RankExit:
    return RankExit(0, number, 1, 0)


def test_patience_ends_with_failures_and_no_commit_in_between() -> None:
    patience = Patience(2, None)
    assert not any(patience.failed(end(i)) for i in range(4))
    patience.committed()
    assert len(patience.failures) == 4  # still known, in case that the job is given up for another reason
    assert not any(patience.failed(end(i)) for i in range(4))
    assert not patience.world_began()  # nothing was gained
    assert "no commit" in patience.failed(end(9))


def test_patience_ends_with_too_many_worlds() -> None:
    patience = Patience(2, 1)
    assert not patience.world_began()
    assert not patience.world_began()
    assert "--reset-limit is 1" in patience.world_began()


def test_a_host_that_comes_and_goes_is_asked_for_ever_more_seldom_until_it_stays() -> None:
    def nothing(*_: object) -> Never:
        raise AssertionError

    with selectors.DefaultSelector() as selector:
        hosts = ElasticHosts(nothing, nothing, selector, nothing, 1.0)
        host, now, pauses = ElasticHost("h"), 100.0, []
        for seconds in (5.0, 5.0, 5.0, 5.0, 59.0, 5.0, 5.0, 61.0, 5.0):
            hosts.came(host, {}, now)
            now += seconds
            hosts.lost(host, now)
            pauses.append(host.free_at - now)
            now = host.free_at
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 1.0, 2.0]


def test_hosts_are_read_as_horovod_reads_them() -> None:
    assert parse("h1:2\nh2\n# nobody\n\nuser@h1:1\nh3:0\n", 4) == (Host("h1", 2), Host("h2", 4), Host("user@h1", 1))


@pytest.mark.parametrize("text", ["h1:two", "h 1:2", "-oProxyCommand=x:1", "h1"])
def test_what_a_script_may_not_say_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse(text, None)


def test_a_script_is_asked_without_waiting_and_its_failure_told(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho h1:2\n")
    with pytest.raises(ConfigurationError, match="chmod"):
        Discovery(str(script), None)
    script.chmod(0o755)
    discovery = Discovery(str(script), None)
    deadline = time.monotonic() + 30
    while (hosts := discovery.poll()) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    assert hosts == (Host("h1", 2),)
    failing = Discovery("false", None)
    failing.poll()
    while failing._process is not None and failing._process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    with pytest.raises(ConfigurationError, match="exit code 1"):
        failing.poll()
    failing.close()
    discovery.close()


@pytest.mark.parametrize("script", ["./no-such-script.sh", "no-such-program --of me", "", "'"])
def test_a_script_that_is_not_there_is_an_error_of_the_command(script: str) -> None:
    with pytest.raises(ConfigurationError, match="--host-discovery-script"):
        Discovery(script, None)


def test_a_script_ends_with_what_it_has_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    discovery = Discovery(f"sh -c 'sleep 100 & setsid sleep 100 & echo $$ > {pids}; sleep 100'", None)
    deadline = time.monotonic() + 30
    discovery.poll()
    while not (pids.exists() and len(_of(discovery)) == 4) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(_of(discovery)) == 4
    discovery.close()
    assert _of(discovery) == []


def test_a_script_that_clears_its_environment_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidist_launch.elastic_job.discovery._SCRIPT_SEC", 0.0)
    pids = tmp_path / "pids"
    discovery = Discovery(f"sh -c 'echo $$ > {pids}; exec env -i sleep 100'", None)
    discovery.poll()
    deadline = time.monotonic() + 30
    while not (pids.exists() and pids.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = int(pids.read_text())
    while Path(f"/proc/{pid}/environ").read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(ConfigurationError, match="did not end within"):
        discovery.poll()
    assert not Path(f"/proc/{pid}").exists()
    discovery.close()


def _of(discovery: Discovery) -> list[int]:
    return process_sweep.find_processes(discovery._mark, {})


def test_slots_go_on_with_the_workers_and_failures_that_were_kept() -> None:
    slots = Slots()
    slots.offer([Host("h1", 2), Host("h2", 1)])
    one, _, three = slots.free(0.0, 3)
    one.worker, three.worker = 0, 2
    slots.failed(2, 0.0, was_useful=False)
    again = Slots()
    again.offer([Host("h1", 2)])
    again.restore(slots.snapshot())
    assert again.snapshot() == slots.snapshot()
    assert again.num_on("h2") == 0  # it is not offered any more
    again.take("h1", 3, instead_of={0})
    assert again.slot_of(0) is None
    again.take("h1", 4, instead_of={0})
    again.take("h1", 5, instead_of={0})
    assert [slot.worker for slot in again._slots] == [3, 4, None]


def test_patience_goes_on_with_what_was_kept() -> None:
    patience = Patience(1, reset_limit=1)
    patience.world_began()
    patience.failed(RankExit(0, 10, 1, 1, ("Traceback",)))
    again = Patience(1, reset_limit=1)
    again.restore(json.loads(json.dumps(patience.snapshot())))
    assert again.failures == patience.failures
    assert not again.failed(RankExit(0, 11, 1, 2))
    assert again.failed(RankExit(0, 12, 1, 3))
    assert not again.world_began()
    assert "--reset-limit is 1" in again.world_began()


def test_without_an_option_of_its_own_a_job_is_not_elastic() -> None:
    assert not elastic_options.is_elastic(NONE)
    assert elastic_options.is_elastic({**NONE, "min_np": 1})
    with pytest.raises(ConfigurationError, match="--reset-limit is for elastic jobs"):
        elastic_options.is_elastic({**NONE, "reset_limit": 3})


@pytest.mark.parametrize(
    ("changed", "hosts", "message"),
    [
        ({"min_np": 3}, (), "-np lies between"),
        ({"max_np": 1}, (), "-np lies between"),
        ({"min_np": 1, "blacklist_cooldown_range": (5.0, 1.0)}, (), "MIN is above MAX"),
        ({"host_discovery_script": "x"}, (Host("h", 1),), "leave -H and --hostfile out"),
        ({"min_np": 1, "orphan_timeout": 5.0}, (), "give --state-dir too"),
        ({"min_np": 1, "checkpoint_interval": "3"}, (), "--checkpoint-interval is for checkpoints"),
        ({"min_np": 1, "keep_last": 3}, (), "--keep-last is for checkpoints"),
        ({"min_np": 1, "slots_per_host": 4}, (Host("h", 2),), "leave --slots-per-host out"),
        ({"min_np": 1, "slots_per_host": 1}, (), "-np 2 needs 2 slots, but --slots-per-host gives 1"),
        ({"checkpoint_dir": Path("x"), "checkpoint_interval": "soon"}, (), "'soon': give a number of seconds"),
        ({"checkpoint_dir": Path("x"), "checkpoint_interval": "0"}, (), "give more than 0"),
    ],
)
def test_contradictions_are_refused(changed: dict[str, object], hosts: tuple[Host, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        elastic_options.limits({**NONE, **changed}, 2, hosts, Settings())


def test_limits_default_to_the_number_of_ranks_and_the_environments_timeout() -> None:
    found = elastic_options.limits({**NONE, "min_np": 1}, 2, (), Settings.read({"HOROVOD_ELASTIC_TIMEOUT": "7"}))
    assert (found.min_num, found.max_num, found.timeout.total_seconds()) == (1, 2, 7.0)


@pytest.mark.parametrize(
    ("changed", "hosts", "message"),
    [
        ({"max_np": 4}, (), "--max-np is 4, but there are 2 slots.*--slots-per-host 4"),
        ({"max_np": 4}, (Host("a", 2), Host("b", 1)), "there are 3 slots.*name more hosts"),
        ({"max_np": 4, "slots_per_host": 4}, (), "^$"),
        ({"max_np": 4}, (Host("a", 4),), "^$"),
        ({"max_np": 4, "host_discovery_script": "x"}, (), "^$"),
    ],
)
def test_ranks_for_which_there_will_never_be_slots_are_warned_of(
    changed: dict[str, object], hosts: tuple[Host, ...], message: str
) -> None:
    limits = elastic_options.limits({**NONE, **changed}, 2, hosts, Settings())
    assert re.search(message, elastic_options.never_reached(limits, 2, hosts))


def test_events_are_lines_of_json_and_listeners_hear_them(tmp_path: Path) -> None:
    heard = []
    log = EventLog(tmp_path / "log")
    log.listen(lambda event, fields: heard.append((event, fields)))
    log.publish("lost", rank=1)
    log.close()
    assert heard == [("lost", {"rank": 1})]
    assert '"event": "lost", "rank": 1}' in (tmp_path / "log").read_text()
    with pytest.raises(ConfigurationError, match="--event-log"):
        EventLog(tmp_path / "no" / "log")


def test_only_what_is_out_of_the_ordinary_is_told() -> None:
    assert event_line("joined", {"worker": 1}) == ""
    assert event_line("left", {"worker": 2, "rank": None, "progress": -1}) == ""
    assert event_line("short", {"waiting": 1, "needed": 1}) == ""
    assert event_line("short", {"waiting": 1, "needed": 2})
    assert event_line("generation", {"generation": 0, "world_size": 2, "progress": 0}) == ""
    assert "2 ranks go on from commit 7" in event_line("generation", {"generation": 1, "world_size": 2, "progress": 7})
    assert "1 rank goes on from commit 7" in event_line("generation", {"generation": 1, "world_size": 1, "progress": 7})
