"""Elastic jobs of real processes on this host: ranks that are killed, hang, leave and come."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from elastic_job import ElasticJob, script, total
from unidist_command import Command

Start = Callable[..., ElasticJob]


@pytest.fixture
def start(command: Command) -> Start:
    """Start `unidist launch OPTIONS` of the script with so many steps."""

    def launch(*options: str, steps: int = 60, pace: float = 0.02, code: str = "", **env: str) -> ElasticJob:
        name = command.script(code or script())
        events = command.folder / "events.jsonl"
        arguments = ["launch", *options, "--event-log", str(events), sys.executable, name, str(steps), str(pace)]
        return ElasticJob(command.start(*arguments, env=env), events)

    return launch


def ended_rank(job: ElasticJob) -> list[int]:
    return [event["rank"] for event in job.events("lost")]


def stop_when_full(command: Command, job: ElasticJob, size: int) -> None:
    """End the job by its script once the world has this size again."""

    def is_full() -> bool:
        sizes = [event["world_size"] for event in job.events("generation")]
        return len(sizes) > 2 and sizes[-1] == size

    assert command.wait_until(is_full, 60), job.lines
    (command.folder / "stop").touch()


@pytest.mark.parametrize(("size", "victim"), [(3, 1), (4, 0)])
def test_survivors_of_a_kill_keep_their_process_and_lose_nothing(
    start: Start, command: Command, size: int, victim: int
) -> None:
    with start("-np", str(size), "--min-np", "2", steps=1_000_000) as job:
        pids = {job.pid(rank, size) for rank in range(size)}
        job.wait_for(r"step 20 .*")
        killed = job.pid(victim, size)
        os.kill(killed, signal.SIGKILL)
        stop_when_full(command, job, size)
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    assert pids - {killed} <= job.survivors()
    assert len(job.survivors()) == size  # one came in its place
    assert ended_rank(job) == [victim]
    assert [event["world_size"] for event in job.events("generation")] == [size, size - 1, size]


def test_one_that_stands_by_takes_the_place_of_a_killed_rank_at_once(start: Start, command: Command) -> None:
    options = ("-np", "2", "--min-np", "1", "--spares", "1")
    with start(*options, steps=1_000_000) as job:
        pids = [job.pid(rank, 2) for rank in range(2)]
        for kill in range(2):  # the second one is replaced by what has taken the place of the spare one
            assert command.wait_until(lambda kill=kill: len(job.events("standby")) > kill, 60), job.lines
            os.kill(pids[kill], signal.SIGKILL)
            assert command.wait_until(lambda kill=kill: len(job.events("generation")) > kill + 1, 60), job.lines
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    assert [event["world_size"] for event in job.events("generation")] == [2, 2, 2]
    assert not {pids[0], pids[1]} & job.survivors()


def test_a_host_that_takes_a_slot_back_keeps_its_spare_process(start: Start, command: Command) -> None:
    hosts = command.folder / "hosts"
    hosts.write_text("localhost:2\n")
    options = ("-np", "2", "--min-np", "1", "--spares", "1", "--host-discovery-script", f"cat {hosts}")
    with start(*options, steps=1_000_000) as job:
        victim = job.pid(1, 2)
        assert command.wait_until(lambda: bool(job.events("standby")), 60), job.lines
        os.kill(victim, signal.SIGKILL)  # now a rank has what was the spare place
        assert command.wait_until(lambda: len(job.events("standby")) > 1, 60), job.lines
        hosts.write_text("localhost:1\n")
        job.wait_for(r"enter 0 1 .*")
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    assert [event["world_size"] for event in job.events("generation")] == [2, 2, 1]


def test_two_that_are_killed_one_during_the_reform_are_both_replaced(start: Start, command: Command) -> None:
    with start("-np", "4", "--min-np", "1", steps=1_000_000) as job:
        pids = [job.pid(rank, 4) for rank in range(4)]
        job.wait_for(r"step 20 .*")
        os.kill(pids[1], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while not job.events("ended") and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(pids[0], signal.SIGKILL)
        stop_when_full(command, job, 4)
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    assert {pids[2], pids[3]} <= job.survivors()
    assert len(job.survivors()) == 4


def test_a_rank_whose_script_raises_is_replaced_and_its_error_shown(start: Start) -> None:
    code = script(in_step="if place.rank == 1 and state.step == 9 and place.world_size == 3 and "
                  "os.environ['UNIDIST_WORKER'] == '1': raise ValueError('one bad batch')")  # fmt: skip
    with start("-np", "3", "--min-np", "2", code=code, steps=100) as job:
        assert job.end() == 0, job.lines
    assert job.totals() == {total(100)}
    assert any("ValueError: one bad batch" in line for line in job.lines)


def test_ranks_follow_the_discovery_script(start: Start, command: Command) -> None:
    hosts = command.folder / "hosts"
    hosts.write_text("localhost:2\n")
    discover = command.folder / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    options = ("-np", "2", "--min-np", "1", "--max-np", "4", "--host-discovery-script", str(discover))
    with start(*options, steps=1_000_000) as job:
        first = job.pid(0, 2)
        for size in (4, 1, 3):
            hosts.write_text(f"localhost:{size}  # and nobody else\n")
            job.wait_for(rf"enter 0 {size} .*")
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    assert first in job.survivors()
    sizes = iter(event["world_size"] for event in job.events("generation"))
    assert all(size in sizes for size in (2, 4, 1, 3))  # in this order; on a busy machine two come one by one
    assert job.events("lost") == []


@pytest.mark.soak
def test_when_all_hosts_are_replaced_the_new_ones_go_on_where_the_others_were(start: Start, command: Command) -> None:
    hosts = command.folder / "hosts"
    hosts.write_text("localhost:2\n")
    options = ("-np", "2", "--min-np", "1", "--host-discovery-script", f"cat {hosts}", "--output-dir", "kept")
    with start(*options, steps=1_000_000) as job:
        first = {job.pid(rank, 2) for rank in range(2)}
        job.wait_for(r"step 10 .*")
        hosts.write_text("")  # nobody: a mistake, say
        assert command.wait_until(lambda: any("hosts are now none" in line for line in job.lines), 30)
        hosts.write_text("127.0.0.1:2\n")
        assert command.wait_until(lambda: len(job.events("left")) == 2, 60), job.lines
        stop_when_full(command, job, 2)
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    assert not first & job.survivors()
    assert min(event["progress"] for event in job.events("generation")[1:]) >= 10
    assert sum("step" in path.read_text() for path in (command.folder / "kept").glob("rank.*/stdout")) == 4


def test_a_stopped_rank_is_found_by_its_silence_and_replaced(start: Start, command: Command) -> None:
    with start("-np", "3", "--min-np", "2", steps=1_000_000, UNIDIST_HEARTBEAT_SEC="3") as job:
        stopped = job.pid(1, 3)
        job.wait_for(r"step 10 .*")
        os.kill(stopped, signal.SIGSTOP)
        stop_when_full(command, job, 3)
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    assert not psutil.pid_exists(stopped)
    assert [event["rank"] for event in job.events("hung")] == [1]


@pytest.mark.parametrize(("who", "words"), [("agent", "its agent was stopped"), ("worker", "it has been stopped")])
def test_one_that_is_stopped_before_its_first_word_is_replaced(
    start: Start, command: Command, who: str, words: str
) -> None:
    def newcomers() -> list[psutil.Process]:
        found = []
        for process in psutil.Process(job.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                own = "worker" if "UNIDIST_WORKER" in process.environ() else "agent"
                found += [process] if own == who else []
        return found

    with start("-np", "2", "--min-np", "2", steps=20, UNIDIST_HEARTBEAT_SEC="1") as job:
        assert command.wait_until(newcomers, 30), job.lines
        newcomers()[0].suspend()
        assert job.end() == 0, job.lines
    assert job.totals() == {total(20)}
    assert any(words in line for line in job.lines), job.lines


@pytest.mark.parametrize("who", ["launcher", "everybody"])
def test_a_job_that_is_frozen_as_a_whole_or_whose_launcher_is_goes_on(start: Start, command: Command, who: str) -> None:
    with start("-np", "3", "--min-np", "2", steps=1_000_000, UNIDIST_HEARTBEAT_SEC="1") as job:
        ranks = {job.pid(rank, 3) for rank in range(3)}
        job.wait_for(r"step 10 .*")
        launcher = psutil.Process(job.process.pid)
        frozen = [launcher, *(launcher.children(recursive=True) if who == "everybody" else ())]
        for process in frozen:
            process.suspend()
        time.sleep(4.0)
        for process in frozen:
            process.resume()
        time.sleep(2.5)  # whoever would be taken for lost would be by now
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    assert job.survivors() == ranks
    assert len(job.events("generation")) == 1


def test_a_rank_that_holds_pythons_lock_shows_its_stacks_and_is_replaced(start: Start) -> None:
    code = script(
        setup="import ctypes, signal",
        in_step="""
        if os.environ["UNIDIST_WORKER"] == "1" and state.step == 10:
            while True:
                ctypes.PyDLL(None).sleep(100)
        """,
    )
    with start("-np", "3", "--min-np", "2", code=code, steps=150, UNIDIST_HEARTBEAT_SEC="3") as job:
        assert job.end() == 0, job.lines
    assert job.totals() == {total(150)}
    assert any("most recent call first" in line for line in job.lines)
    assert any("script.py" in line and "in train" in line for line in job.lines)


def test_a_rank_that_gets_sigterm_leaves_at_a_commit_and_no_step_is_lost(start: Start, command: Command) -> None:
    with start("-np", "3", "--min-np", "2", steps=1_000_000) as job:
        leaving = job.pid(2, 3)
        job.wait_for(r"step 20 .*")
        os.kill(leaving, signal.SIGTERM)
        for rank in range(2):
            job.pid(rank, 2)
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    (left,) = job.events("left")
    assert job.events("lost") == []
    # The others go on with the very step after the one that it committed.
    assert {int(step) for (step,) in job.said(r"enter \d 2 (\d+) \d+")} == {left["progress"]}


def test_a_rank_that_always_dies_ends_the_job_with_its_error(start: Start) -> None:
    code = script(setup="if os.environ['UNIDIST_WORKER'] != '0': raise RuntimeError('no such device')")
    options = ("-np", "2", "--min-np", "2", "--blacklist-cooldown-range", "0.01", "0.02")
    with start(*options, code=code) as job:
        assert job.end() == 1
    text = "\n".join(job.lines)
    assert "no such device" in text
    assert "unidist: the job has ended: " in text
    assert len(job.events("exit")) <= 8


@pytest.mark.parametrize("durable", [False, True])
def test_a_job_whose_ranks_are_all_lost_again_and_again_goes_on_while_it_commits(
    start: Start, command: Command, durable: bool
) -> None:
    options = ("-np", "1", "--min-np", "1", "--blacklist-cooldown-range", "0.01", "0.01")
    if durable:
        options += ("--checkpoint-dir", "run", "--checkpoint-interval", "0.1")
    with start(*options, steps=1_000_000) as job:
        for number in range(4):  # twice -np would be given up
            assert command.wait_until(lambda n=number: len(job.said(r"enter .*")) == n + 1, 60), job.lines
            begun = len(job.said(r"step .*"))
            assert command.wait_until(lambda n=begun: len(job.said(r"step .*")) > n + 60, 60), job.lines
            os.kill(int(job.said(r"enter \d \d \d+ (\d+)")[-1][0]), signal.SIGKILL)
        assert command.wait_until(lambda: len(job.said(r"enter .*")) == 5, 60), job.lines
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    assert not job.events("give_up")
    begins = [int(step) for (step,) in job.said(r"enter \d \d (\d+) \d+")]
    assert all(begins[1:]) == durable


@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_a_rank_that_dies_in_the_first_init_does_not_take_the_others_along(
    start: Start, command: Command, engine: str
) -> None:
    dying = """
from unidist.runtime import communicators
if os.environ["UNIDIST_WORKER"] == "1":
    connect = communicators.JobCommunicators._connect
    def die(*_):
        time.sleep(0.3)  # the others are waiting by now
        os.kill(os.getpid(), 9)
    communicators.JobCommunicators._connect = die
"""
    code = script(setup=dying)
    options = ("-np", "3", "--min-np", "2", "--engine", engine)
    with start(*options, steps=1_000_000, code=code) as job:
        # The lost one may be back before both of the others have reached a certain step.
        assert command.wait_until(lambda: len(job.said(r"step \d+ .*")) >= 2, 60), job.lines
        stop_when_full(command, job, 3)
        assert job.end() == 0, job.lines[-30:]
    (steps,) = job.steps()
    assert job.totals() == {total(steps)}
    ended = [event["worker"] for event in job.events("exit") if event["returncode"]]
    assert ended == [1]


@pytest.mark.parametrize("limit", [0, 1])
def test_the_reset_limit_ends_the_job_with_the_code_of_the_failure_and_its_host(
    start: Start, command: Command, limit: int
) -> None:
    code = script(
        setup="from pathlib import Path",
        in_step="""
        while state.step == 10 and not os.path.exists("killed"):
            time.sleep(0.01)
        if place.rank == 1 and state.step == 20:
            raise SystemExit(7)
        """,
    )
    options = ("-np", "3", "--min-np", "1", "--reset-limit", str(limit), "--blacklist-cooldown-range", "60", "60")
    with start(*options, "-H", "localhost:2,127.0.0.1:1", steps=1000, code=code) as job:
        if limit:  # a loss before, which has been made good
            pid = job.pid(2, 3)
            job.wait_for(r"step 5 .*")
            os.kill(pid, signal.SIGKILL)
        (command.folder / "killed").touch()
        assert job.end() == 7, job.lines[-30:]
    text = "\n".join(job.lines)
    assert f"--reset-limit is {limit}" in text
    assert "rank 1 failed first (host localhost" in text
    assert "exit code 7" in text


def test_too_few_ranks_for_too_long_end_the_job(start: Start) -> None:
    options = ("-np", "2", "--min-np", "2", "--elastic-timeout", "0.5", "--blacklist-cooldown-range", "30", "60")
    with start(*options, steps=1_000_000) as job:
        pid = job.pid(1, 2)
        job.wait_for(r"step 5 .*")
        os.kill(pid, signal.SIGKILL)
        assert job.end() != 0
    assert any("--elastic-timeout" in line for line in job.lines)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_nothing_outlives_the_launcher(start: Start, command: Command, number: signal.Signals) -> None:
    with start("-np", "3", "--min-np", "2", steps=100000) as job:
        job.wait_for(r"step 5 .*")
        job.process.send_signal(number)
        job.end(seconds=30)
        assert command.wait_until(lambda: not command.alive(), 30)


def test_a_discovery_script_does_not_outlive_a_launcher_that_is_killed(start: Start, command: Command) -> None:
    discover = command.folder / "discover.sh"
    discover.write_text("#!/bin/sh\nif [ -e asked ]; then touch again; sleep 1000; fi\n"
                        "touch asked\necho localhost:1\n")  # fmt: skip
    discover.chmod(0o755)
    with start("-np", "1", "--min-np", "1", "--host-discovery-script", str(discover), steps=100000) as job:
        job.wait_for(r"step 5 .*")
        assert command.wait_until((command.folder / "again").exists, 30)
        job.process.kill()
        job.end(seconds=30)
        assert command.wait_until(lambda: not command.alive(), 30)


@pytest.mark.soak
def test_a_host_that_is_lost_again_and_again_is_asked_for_ever_more_seldom(start: Start, command: Command) -> None:
    with start("-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1", steps=1_000_000) as job:
        for number in range(3):
            assert command.wait_until(lambda n=number: len(job.events("host_joined")) == n + 2, 60), job.lines
            step = max((int(found) for (found,) in job.said(r"step (\d+) .*")), default=0)
            job.wait_for(rf"step {step + 5} .*")
            agents = psutil.Process(job.process.pid).children()
            *_, last = [each for each in agents if "unidist_launch.agent.agent" in each.cmdline()]
            last.kill()
        assert command.wait_until(lambda: len(job.events("host_joined")) == 5, 60), job.lines
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    lost = [event["time"] for event in job.events("host_lost")]
    again = [event["time"] for event in job.events("host_joined")][2:]
    assert [after - before >= pause for before, after, pause in zip(lost, again, (1, 2, 4), strict=True)] == [True] * 3


def test_a_bad_command_is_an_error_and_no_storm(start: Start, command: Command) -> None:
    done = command.run("launch", "-np", "2", "--min-np", "1", "no-such-program-at-all")
    assert done.returncode == 2
    assert "no-such-program-at-all" in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_kills_at_random_steps_cost_less_than_a_second_and_the_join_less_than_half(
    start: Start, command: Command, seed: int
) -> None:
    chance = random.Random(seed)
    size = chance.choice((3, 4))
    victim, step = chance.randrange(size), chance.randrange(5, 80)
    with start("-np", str(size), "--min-np", "2", steps=1_000_000) as job:
        pids = {rank: job.pid(rank, size) for rank in range(size)}
        job.wait_for(rf"step {step} {victim} .*")
        os.kill(pids[victim], signal.SIGKILL)
        killed = time.time()
        assert command.wait_until(lambda: len(job.events("generation")) == 3, 60), job.lines
        job.wait_for(rf"step {job.events('generation')[2]['progress'] + 5} .*")
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
    survivors = set(pids.values()) - {pids[victim]}
    steps = [(int(number), int(pid), float(at)) for number, _, pid, at in job.said(r"step (\d+) (\d+) (\d+) (\S+)")]
    times = sorted(at for _, pid, at in steps if pid in survivors)
    first, second = [event["time"] for event in job.events("generation")][1:3]
    recovery = min(at for at in times if at > first) - killed
    joined = second
    pause = min(at for at in times if at > joined) - max(at for at in times if at <= joined)
    print(f"size {size}, rank {victim}, step {step}: next step after {recovery:.3f} s, pause of the join {pause:.3f} s")
    assert recovery < 1.0
    assert pause < 0.5
    (count,) = job.steps()
    assert job.totals() == {total(count)}


def test_a_launcher_that_cannot_do_it_is_refused(command: Command) -> None:
    done = command.run_here("launch", "-np", "2", "--min-np", "1", "--launcher", "local", "true")
    assert done.returncode == 2
    assert "launcher 'local' keeps the ranks that it started" in done.stderr


def test_events_tell_what_happened(start: Start, tmp_path: Path) -> None:
    with start("-np", "2", "--min-np", "1", steps=5) as job:
        assert job.end() == 0
    kinds = [event["event"] for event in job.events()]
    assert kinds[0] == "job"
    assert kinds[-1] == "end"
    assert kinds.count("started") == kinds.count("joined") == kinds.count("exit") == 2
    assert all(event["time"] > 1e9 for event in job.events())
