"""Flags of horovodrun: what each becomes on the ranks, what tunes Horovod alone, and what is so anyway."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import replace

import pytest
from rank_lines import rank_lines
from unidist_command import Command

from unidist_launch.commands.doctor import doctor
from unidist_launch.options import horovodrun
from unidist_launch.options.horovodrun import horovod_variables, warnings_of_variables

pytestmark = pytest.mark.parallel

SHOW = "import json; print('ENV', json.dumps({k: v for k, v in os.environ.items()}))"


def planned(command: Command, *options: str, env: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment that one rank with these options would have, but for what the launcher itself adds."""
    job, _ = command.job_here("launch", "-np", "1", *options, command.script(SHOW), env=env)
    return {**os.environ, **(env or {}), **job.env}


def refused(command: Command, *options: str) -> str:
    """Return the error that these options end in, before anything starts."""
    done = command.run_here("launch", *options, command.script("open('started', 'w')"))
    assert done.returncode == 2, done.stderr
    assert not (command.folder / "started").exists()
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ("--fusion-threshold-mb", "3"),
            {"UNIDIST_FUSION_THRESHOLD_BYTES": "3145728", "HOROVOD_FUSION_THRESHOLD": "3145728"},
        ),
        (("--fusion-threshold-mb", "0"), {"UNIDIST_FUSION_THRESHOLD_BYTES": "0", "HOROVOD_FUSION_THRESHOLD": "0"}),
        (("--cycle-time-ms", "2.5"), {"UNIDIST_CYCLE_TIME_MS": "2.5", "HOROVOD_CYCLE_TIME": "2.5"}),
        (("--cache-capacity", "65536"), {"UNIDIST_CACHE_CAPACITY": "65536", "HOROVOD_CACHE_CAPACITY": "65536"}),
        (("--start-timeout", "40"), {"UNIDIST_START_TIMEOUT_SEC": "40"}),
        (
            ("--stall-check-warning-time-seconds", "7"),
            {
                "UNIDIST_STALL_CHECK_SEC": "7",
                "HOROVOD_STALL_CHECK_TIME_SECONDS": "7",
                "HOROVOD_STALL_CHECK_DISABLE": "0",
            },
        ),
        (("--no-stall-check",), {"UNIDIST_STALL_CHECK_SEC": "0", "HOROVOD_STALL_CHECK_DISABLE": "1"}),
        (
            ("--stall-check-shutdown-time-seconds", "90"),
            {"UNIDIST_STALL_SHUTDOWN_SEC": "90", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"},
        ),
        (("--log-level", "DEBUG"), {"UNIDIST_LOG_LEVEL": "debug", "HOROVOD_LOG_LEVEL": "debug"}),
        (("--log-with-timestamp",), {"UNIDIST_LOG_TIMESTAMP": "1", "HOROVOD_LOG_HIDE_TIME": "0"}),
        (("--no-log-hide-timestamp",), {"UNIDIST_LOG_TIMESTAMP": "1", "HOROVOD_LOG_HIDE_TIME": "0"}),
        (("--log-without-timestamp",), {"UNIDIST_LOG_TIMESTAMP": "0", "HOROVOD_LOG_HIDE_TIME": "1"}),
        (("--log-hide-timestamp",), {"UNIDIST_LOG_TIMESTAMP": "0", "HOROVOD_LOG_HIDE_TIME": "1"}),
        (
            ("--timeline-filename", "/t.json", "--timeline-mark-cycles"),
            {"UNIDIST_TIMELINE": "/t.json", "UNIDIST_TIMELINE_MARK_CYCLES": "1"},
        ),
        (("--no-timeline-mark-cycles",), {"UNIDIST_TIMELINE_MARK_CYCLES": "0"}),
        (("--tcp",), {"NCCL_IB_DISABLE": "1"}),
        (("--network-interfaces", "lo"), {"NCCL_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo"}),
        (
            ("--network-interface", "lo", "--network-interface", "lo"),
            {"NCCL_SOCKET_IFNAME": "lo", "HOROVOD_GLOO_IFACE": "lo"},
        ),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, tuple) else "",
)
def test_a_flag_becomes_our_variable_and_horovods(
    command: Command, options: tuple[str, ...], expected: dict[str, str]
) -> None:
    env = planned(command, *options)
    assert {name: env.get(name) for name in expected} == expected


def test_the_timeline_is_not_given_to_horovod_which_would_write_the_same_file(command: Command) -> None:
    assert "HOROVOD_TIMELINE" not in planned(command, "--timeline", "t.json")


def test_a_flag_wins_over_horovods_variable(command: Command) -> None:
    env = planned(command, "--cycle-time-ms", "2", env={"HOROVOD_CYCLE_TIME": "9"})
    assert (env["UNIDIST_CYCLE_TIME_MS"], env["HOROVOD_CYCLE_TIME"]) == ("2", "2")


def test_horovod_gets_whole_seconds_that_are_not_shorter() -> None:
    found = horovod_variables({"UNIDIST_STALL_CHECK_SEC": "0.5", "UNIDIST_STALL_SHUTDOWN_SEC": "7.1"})
    assert found == {
        "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "1",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8",
    }
    assert horovod_variables({"UNIDIST_TIMEOUT_SEC": "3", "UNIDIST_TIMELINE": "t"}) == {}


@pytest.mark.parametrize("flag", horovodrun.ALREADY_SO)
def test_what_is_so_anyway_is_accepted_and_changes_nothing(command: Command, flag: str) -> None:
    script = command.script(SHOW)
    with_flag, done = command.job_here("launch", "-np", "1", flag, script)
    without, _ = command.job_here("launch", "-np", "1", script)
    assert replace(with_flag, observers=()) == replace(without, observers=())
    assert done.stderr == ""


@pytest.mark.parametrize("flag", horovodrun.TUNING, ids=lambda flag: flag.name)
def test_a_flag_that_tunes_horovod_alone_is_one_warning_and_reaches_horovod(flag: horovodrun.Tuning) -> None:
    """tests/test_horovod_doc.py tries the flags themselves."""
    options = {each.parameter: None for each in horovodrun.TUNING}
    assert horovodrun.warnings_of_flags(options, engine="auto") == []
    options[flag.parameter] = True if flag.kind is None else flag.kind(3)
    (warning,) = horovodrun.warnings_of_flags(options, engine="auto")
    assert warning.startswith(f"{flag.name} of horovodrun has ")
    assert warning.endswith(f": {flag.advice}")
    assert len(horovodrun.warnings_of_flags(options, engine="horovod")) == (0 if flag.variable else 1)
    value = {None: "1", int: "3", float: "3.0", str: "3"}[flag.kind]
    assert horovodrun.tuning_variables(options) == ({flag.variable: value} if flag.variable else {})


def test_flags_that_only_tune_never_end_a_job(command: Command) -> None:
    flags = [
        *("--hierarchical-allreduce", "--no-torus-allreduce", "--autotune-warmup-samples=3", "--gloo-timeout-seconds"),
        *("9", "--mpi", "--mpi-args=--map-by ppr:6:node", "--jsrun", "--binding-args=--rankfile f", "--ssh-port", "22"),
        *("-i", "key", "--network-interfaces", "lo,no-such-one", "--cache-capacity", "70000", "--mpi-threads-disable"),
        *("--timeline-mark-cycles", "--num-nccl-streams", "2", "--thread-affinity", "1"),
    ]
    done = command.run("launch", "-np", "1", *flags, command.script(SHOW))
    assert done.returncode == 0, done.stderr
    env = json.loads(done.stdout.partition("ENV ")[2])
    assert (env["HOROVOD_HIERARCHICAL_ALLREDUCE"], env["HOROVOD_TORUS_ALLREDUCE"]) == ("1", "0")
    assert env["UNIDIST_CACHE_CAPACITY"] == "65536"
    warnings = [line for line in done.stderr.splitlines() if line.startswith("unidist: warning: ")]
    for text in (
        "--hierarchical-allreduce of horovodrun has an effect with --engine horovod only: use --allreduce-algorithm",
        "--mpi of horovodrun has no effect: MPI does not start the ranks. For that use --launcher mpi",
        "--ssh-port, --ssh-identity-file: not used, for all ranks run on this host",
        "--network-interfaces: there is no no-such-one here, only lo",
        "--cache-capacity 70000: 65536 are taken",
        "--timeline-mark-cycles marks the cycles of a trace; add --timeline FILE.",
    ):
        assert len([line for line in warnings if text in line]) == 1, text
    assert len(warnings) == 14, warnings


def test_every_advice_is_short_and_a_sentence() -> None:
    for advice in (*(flag.advice for flag in horovodrun.TUNING), *horovodrun.WITHOUT_EFFECT.values()):
        assert advice.endswith(".")
        assert len(advice) < 180


@pytest.mark.parametrize("host", ["localhost:2", "127.0.0.1:4", f"{socket.gethostname()}:2", "localhost:1,localhost:1"])
def test_this_host_is_accepted(command: Command, host: str) -> None:
    done = command.run("launch", "-np", "2", "-H", host, command.script("print(rank)"))
    assert sorted(done.stdout.splitlines()) == ["[0] 0", "[1] 1"], done.stderr


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("localhost:1", "-np 2 needs 2 slots, but localhost:1 gives 1"),
        ("localhost:1,node9:0", "cannot be read: write HOST:SLOTS"),
        ("localhost", "cannot be read: write HOST:SLOTS"),
        ("localhost:many", "cannot be read: write HOST:SLOTS"),
    ],
)
def test_what_cannot_be_read_and_too_few_slots_are_refused(command: Command, hosts: str, message: str) -> None:
    assert message in refused(command, "-np", "2", "--hosts", hosts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stall-check", "3", "--no-stall-check"), "exclude each other"),
        (("-p", "22"), "-p is not horovodrun's --ssh-port"),
        (("--fusion-threshold-mb", "-1"), "x>=0"),
        (("--log-level", "loud"), "'loud' is not one of"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(command: Command, options: tuple[str, ...], message: str) -> None:
    assert message in refused(command, "-np", "1", *options)


def test_marks_need_a_timeline_from_wherever_it_comes(command: Command) -> None:
    env = planned(command, "--timeline-mark-cycles", env={"HOROVOD_TIMELINE": "t.json"})
    assert env["UNIDIST_TIMELINE_MARK_CYCLES"] == "1"


def test_output_is_kept_under_horovods_name_of_the_option(command: Command) -> None:
    done = command.run("launch", "-np", "1", "--output-filename", "kept", command.script("print('hello')"))
    assert done.returncode == 0, done.stderr
    assert (command.folder / "kept" / "rank.0" / "stdout").read_text() == "hello\n"


@pytest.mark.parametrize("flag", ["--prefix-output-with-timestamp", "-prefix-timestamp"])
def test_lines_begin_with_the_time_when_asked_and_files_do_not(command: Command, flag: str) -> None:
    script = command.script("print('out'); print('err', file=sys.stderr)")
    done = command.run("launch", "-np", "1", flag, "--output-dir", "kept", script)
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
    assert re.fullmatch(time + r"\[0\] out\n", done.stdout)
    assert re.fullmatch(time + r"\[0!\] err\n", done.stderr)
    assert (command.folder / "kept" / "rank.0" / "stdout").read_text() == "out\n"


@pytest.mark.parametrize("flag", ["-cb", "--check-build"])
def test_check_build_is_doctor_and_needs_no_number_of_processes(
    command: Command, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr(doctor, "callback", lambda **given: print("doctor", given) or 5)
    done = command.run_here("launch", flag)
    assert (done.returncode, done.stdout) == (5, "doctor {'as_json': False, 'deep': False}\n")


def test_check_build_prints_what_doctor_prints(command: Command) -> None:
    done, of_doctor = command.run("launch", "--check-build"), command.run("doctor").stdout
    assert done.returncode == 0, done.stderr
    assert "engine shm" in done.stdout
    memory = r"\d+\.\d GiB|\s+"  # changes from moment to moment, and the spaces after it
    assert re.sub(memory, "", done.stdout) == re.sub(memory, "", of_doctor)


def test_the_version_is_told(command: Command) -> None:
    assert command.run_here("launch", "--version").stdout == command.run_here("--version").stdout != ""


HOROVODS_FILE = """
controller: gloo
params:
  fusion_threshold_mb: 32
  cycle-time-ms: 5
  cache_capacity: 2048
  hierarchical_allreduce: false
autotune:
  enabled: false
  log_file: horovod_autotune_log.txt
timeline:
  filename: t.json
  mark_cycles: true
stall_check:
  enabled: true
  warning_time_seconds: 120
  shutdown_time_seconds: 180
library_options:
  mpi_threads_disable: false
  thread_affinity:
logging:
  level: INFO
  with_timestamp: true
"""


def test_a_file_written_for_horovodrun_is_carried_out(command: Command) -> None:
    (command.folder / "horovod.yaml").write_text(HOROVODS_FILE)
    line = ("launch", "-np", "1", "--config-file", "horovod.yaml", "--cycle-time-ms", "6", command.script(SHOW))
    done = command.run(*line)
    assert done.returncode == 0, done.stderr
    env = json.loads(done.stdout.partition("ENV ")[2])
    expected = {
        "UNIDIST_FUSION_THRESHOLD_BYTES": str(32 << 20),
        "UNIDIST_CYCLE_TIME_MS": "6",
        "UNIDIST_CACHE_CAPACITY": "2048",
        "UNIDIST_TIMELINE": str(command.folder / "t.json"),
        "UNIDIST_TIMELINE_MARK_CYCLES": "1",
        "UNIDIST_STALL_CHECK_SEC": "120",
        "UNIDIST_STALL_SHUTDOWN_SEC": "180",
        "UNIDIST_LOG_LEVEL": "info",
        "UNIDIST_LOG_TIMESTAMP": "1",
    }
    assert {name: env.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "seconds"),
    [((), "0"), (("--stall-check", "9"), "9")],
    ids=["as the file says", "the command line wins"],
)
def test_a_file_may_switch_the_stall_check_off(command: Command, options: tuple[str, ...], seconds: str) -> None:
    (command.folder / "h.yaml").write_text("stall_check: {enabled: false, warning_time_seconds: 5}\n")
    assert planned(command, "--config", "h.yaml", *options)["UNIDIST_STALL_CHECK_SEC"] == seconds


def test_the_command_line_switches_off_the_stall_check_of_a_file(command: Command) -> None:
    (command.folder / "h.yaml").write_text("stall_check: 5\n")
    assert planned(command, "--config", "h.yaml", "--no-stall-check")["UNIDIST_STALL_CHECK_SEC"] == "0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("params: {fusion_threshold: 3}", "unknown option 'fusion-threshold'. Did you mean 'fusion-threshold-mb'?"),
        ("controller: glo", "h.yaml: unknown controller 'glo'. Did you mean 'gloo'?"),
        ("timeline: {enabled: true}", "section 'timeline': found enabled=True"),
        ("timeline: a.json\ntimeline-filename: b.json", "'timeline' and 'timeline-filename' are the same"),
        ("cache_capacity: 1\nparams: {cache_capacity: 2}", "'cache-capacity' is given twice"),
    ],
)
def test_what_is_wrong_in_such_a_file_is_told_with_the_file(command: Command, text: str, message: str) -> None:
    (command.folder / "h.yaml").write_text(text)
    assert message in refused(command, "-np", "1", "--config", "h.yaml")


def test_keys_of_a_file_that_only_tune_horovod_are_warnings(command: Command) -> None:
    (command.folder / "h.yaml").write_text(
        "controller: mpi\nparams: {torus_allreduce: true}\nautotune: {warmup_samples: 3}\n"
        "library_options: {thread_affinity: 2}\n"
    )
    job, done = command.job_here("launch", "-np", "1", "--config", "h.yaml", command.script(SHOW))
    names = ("HOROVOD_TORUS_ALLREDUCE", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "HOROVOD_THREAD_AFFINITY")
    assert [job.env.get(name) for name in names] == ["1", "3", "2"], done.stderr
    warned = set(re.findall(r"unidist: warning: (--[a-z-]+) of horovodrun", done.stderr))
    assert warned == {"--mpi", "--torus-allreduce", "--autotune-warmup-samples", "--thread-affinity"}


def test_a_large_cache_of_horovods_is_a_smaller_one_here(command: Command) -> None:
    _, done = command.job_here("launch", "-np", "1", "true", env={"HOROVOD_CACHE_CAPACITY": "100000"})
    assert "warning: variable HOROVOD_CACHE_CAPACITY=100000: 65536 are taken" in done.stderr


def test_a_variable_without_effect_is_a_warning(command: Command) -> None:
    tuned = {"HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_THREAD_AFFINITY": "0"}
    _, done = command.job_here("launch", "-np", "1", "true", env=tuned)
    assert (
        "warning: variable HOROVOD_AUTOTUNE_WARMUP_SAMPLES=1 has an effect with --engine horovod only: the search"
        in done.stderr
    )
    assert "AFFINITY" not in done.stderr
    assert warnings_of_variables({"HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1"}, engine="horovod") == []


# What the flags do to a running job

NAMED = """
import pickle, json
from datetime import timedelta
from unidist.runtime import context
from unidist.negotiation.objects import allgather_object
runtime = context.init()
"""


def test_cycles_are_marked_in_the_trace_when_asked(command: Command) -> None:
    script = command.script(NAMED + "print(sum(allgather_object(runtime.negotiator, rank, name='x')))")

    def events(*options: str) -> set[str]:
        done = command.run("launch", "-np", "2", "--timeline-filename", "t.json", *options, script)
        assert rank_lines(done.stdout) == {0: ["1"], 1: ["1"]}, done.stderr
        return {event["name"] for event in json.loads((command.folder / "t.json").read_text())}

    assert events("--timeline-mark-cycles") - events() == {"CYCLE_START"}


def test_an_operation_that_stalls_ends_the_job_after_the_shutdown_time(command: Command) -> None:
    script = command.script(
        NAMED
        + """
if rank == 0:
    allgather_object(runtime.negotiator, rank, name='lonely')
else:
    time.sleep(300)
"""
    )
    begin = time.monotonic()
    done = command.run("launch", "-np", "2", "--stall-check-shutdown-time-seconds", "1", script)
    assert time.monotonic() - begin < 100
    assert done.returncode == 1
    assert "unidist: rank 0 failed first" in done.stderr
    assert "StalledError: rank 0 gave up waiting for other ranks: 'lonely" in done.stderr


@pytest.mark.parametrize(
    ("flag", "reported"), [("--stall-check-warning-time-seconds=0.5", True), ("--no-stall-check", False)]
)
def test_a_stall_is_reported_when_the_flags_say_so(command: Command, flag: str, reported: bool) -> None:
    script = command.script(
        NAMED
        + f"""
if rank == 1:
    time.sleep({3 if reported else 1})
print(sum(allgather_object(runtime.negotiator, rank, name='late')))
"""
    )
    done = command.run("launch", "-np", "2", flag, script)
    assert rank_lines(done.stdout) == {0: ["1"], 1: ["1"]}, done.stderr
    assert ("'late" in done.stderr) is reported


@pytest.mark.parametrize("capacity", ["0", "1"])
def test_a_small_cache_changes_no_result(command: Command, capacity: str) -> None:
    loop = "print([sum(allgather_object(runtime.negotiator, rank, name=name)) for name in 'abcabc'])"
    done = command.run("launch", "-np", "2", "--cache-capacity", capacity, command.script(NAMED + loop))
    assert rank_lines(done.stdout) == {rank: ["[1, 1, 1, 1, 1, 1]"] for rank in range(2)}, done.stderr


def test_log_lines_begin_with_the_time_when_asked(command: Command) -> None:
    done = command.run(
        *("launch", "-np", "1", "--log-with-timestamp", "--log-level", "INFO"),
        command.script(
            "from unidist.runtime import context; context.init()\n"
            "import logging; logging.getLogger('unidist').info('hi')"
        ),
    )
    assert re.search(r"^\[0!\] \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} unidist: hi$", done.stderr, re.MULTILINE), (
        done.stderr
    )
