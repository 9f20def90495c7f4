"""`unidist launch --evaluator`: a process beside the ranks, whose reports reach the trackers."""

from __future__ import annotations

import csv
import signal

import pytest
from unidist_command import Command

pytestmark = pytest.mark.parallel

_TRAIN = """
    from pathlib import Path
    from unidist.checkpoint.format import directory, index
    if rank == 0:
        while not list(Path().glob(".run.reader-*")):
            time.sleep(0.01)
        for step in range(1, 7):
            folder = directory.step_folder(Path("run"), step)
            made = directory.begin(folder)
            (made / index.NAME).write_text(str(step))
            directory.commit(folder)
            directory.prune(Path("run"), 1, step)
            time.sleep(0.05)
        open("saved", "w").close()
    while not Path("saved").exists():
        time.sleep(0.01)
"""
_EVALUATE = """
    from unidist_evaluator import evaluations
    import unidist.horovod_api as ud
    print("role", ud.role(), flush=True)
    for evaluation in evaluations("run"):
        time.sleep(0.1)
        if evaluation.step == 3 and not os.path.exists("failed"):
            open("failed", "w").close()
            os._exit(7)
        evaluation.report(value=2.0 * evaluation.step, nothing=float("nan"))
"""


def _evaluated(command: Command) -> list[tuple[int, str, float]]:
    with (command.folder / "record.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [(int(row["step"]), row["name"], float(row["value"])) for row in rows if row["name"].startswith("eval/")]


@pytest.mark.parametrize("elastic", [[], ["--min-np", "1"]], ids=["fixed", "elastic"])
def test_each_checkpoint_is_evaluated_once_though_the_evaluator_fails(command: Command, elastic: list[str]) -> None:
    train, evaluate = command.script(_TRAIN, "train.py"), command.script(_EVALUATE, "evaluate.py")
    found = command.run("launch", "-np", "2", *elastic, "--evaluator", evaluate, "--track", "csv:record.csv", train)
    assert found.returncode == 0, found.stderr
    assert "[evaluator] role evaluator" in found.stderr
    assert "the evaluator has failed (exit code 7) behind checkpoint 2; it is started again" in found.stderr
    assert _evaluated(command) == [(step, "eval/value", 2.0 * step) for step in range(1, 7)]
    assert {each.name for each in command.folder.iterdir()} >= {"run", "record.csv"}
    assert not list(command.folder.glob(".run.*"))


def test_it_runs_on_the_host_that_is_named(command: Command) -> None:
    train, evaluate = command.script(_TRAIN, "train.py"), command.script(_EVALUATE, "evaluate.py")
    hosts = ("--launcher", "ssh", "-H", "localhost:1,127.0.0.1:1", "--evaluator-host", "1")
    found = command.run("launch", "-np", "2", *hosts, "--evaluator", evaluate, "--track", "csv:record.csv", train)
    assert found.returncode == 0, found.stderr
    assert _evaluated(command) == [(step, "eval/value", 2.0 * step) for step in range(1, 7)]


def test_a_host_that_the_job_does_not_have(command: Command) -> None:
    evaluate = command.script("pass", "evaluate.py")
    train = command.script("time.sleep(0.5)", "train.py")
    found = command.run("launch", "-np", "1", "--evaluator", evaluate, "--evaluator-host", "1", train)
    assert found.returncode == 2
    assert "--evaluator-host 1: the job has 1 host, counted from 0; give 0 to 0" in found.stderr
    found = command.run_here("launch", "-np", "1", "--evaluator-host", "1", train)
    assert found.returncode == 2
    assert "--evaluator-host says where --evaluator runs" in found.stderr


def test_a_job_that_fails_does_not_wait_for_its_evaluator(command: Command) -> None:
    evaluate = command.script("time.sleep(1000)", "evaluate.py")
    train = command.script("time.sleep(0.5); sys.exit(3)", "train.py")
    assert command.run("launch", "-np", "2", "--evaluator", evaluate, train).returncode == 3


def test_an_evaluator_that_always_fails_does_not_end_the_job(command: Command) -> None:
    evaluate = command.script("sys.exit('no data')", "evaluate.py")
    train = command.script("time.sleep(0.5); print('done')", "train.py")
    found = command.run("launch", "-np", "1", "--evaluator", evaluate, train)
    assert found.returncode == 0
    assert found.stderr.count("the evaluator has failed (exit code 1) behind checkpoint -1") == 4
    assert "it is started no more" in found.stderr
    assert "[evaluator] no data" in found.stderr
    assert "done" in found.stdout


def test_ctrl_c_ends_it(command: Command) -> None:
    evaluate = command.script("open('began', 'w'); time.sleep(1000)", "evaluate.py")
    with command.start("launch", "-np", "1", "--evaluator", evaluate, command.script("time.sleep(1000)")) as process:
        assert command.wait_until((command.folder / "began").exists, 30)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130


def test_ctrl_c_ends_the_last_evaluation(command: Command) -> None:
    evaluate = command.script("open('began', 'w'); time.sleep(1000)", "evaluate.py")
    job = command.script("\nwhile not os.path.exists('began'): time.sleep(0.01)\nopen('ended', 'w')", "train.py")
    with command.start("launch", "-np", "1", "--evaluator", evaluate, job) as process:
        assert command.wait_until((command.folder / "ended").exists, 30)
        assert not command.wait_until(lambda: process.poll() is not None, 2), "it waits for the evaluator"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "SIGINT ends the evaluator; its last evaluation is that of checkpoint -1" in told


def test_a_scheduler_that_takes_a_host_back_ends_the_last_evaluation(command: Command) -> None:
    evaluate = command.script("open('began', 'w'); time.sleep(1000)", "evaluate.py")
    job = command.script("\nwhile not os.path.exists('began'): time.sleep(0.01)\nopen(f'ended{rank}', 'w')", "train.py")
    hosts = ("--launcher", "ssh", "-H", "localhost:1,127.0.0.1:1")
    with command.start("launch", "-np", "2", *hosts, "--evaluator", evaluate, job) as process:
        assert command.wait_until(lambda: all((command.folder / f"ended{rank}").exists() for rank in range(2)), 60)
        assert not command.wait_until(lambda: process.poll() is not None, 2), "it waits for the evaluator"
        agents = [each for each in command.alive() if "unidist_launch.agent.agent" in each.cmdline()]
        assert len(agents) == 2
        agents[0].send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert "SIGTERM ends the evaluator; its last evaluation is that of checkpoint -1" in told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("missing.py", "missing.py"),
        ("", "nothing to run"),
        ("'a", "No closing quotation"),
        ("no-such-program", "no-such"),
    ],
)
def test_wrong_commands(command: Command, given: str, message: str) -> None:
    found = command.run_here("launch", "-np", "1", "--evaluator", given, command.script("pass"))
    assert found.returncode == 2
    assert "--evaluator" in found.stderr
    assert message in found.stderr
