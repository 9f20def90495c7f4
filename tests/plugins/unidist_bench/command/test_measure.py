"""`unidist bench` as a user runs it: real ranks, and what cannot be measured."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import psutil
import pytest
from unidist_command import Command

from unidist_bench import read
from unidist_bench.collectives import TRAITS, Collective

QUICK = ("-b", "8", "-e", "1K", "-f", "16", "--iterations", "3", "--warmup", "1")
NAMES = [*map(str, Collective)]


@pytest.mark.parallel
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_collective_is_measured_plain_and_by_name_with_right_results(command: Command, num_ranks: int) -> None:
    options = ("--engine", "shm", "--named", "--json", "out.json")
    done = command.run("bench", "all", "-np", str(num_ranks), *QUICK, *options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = read(command.folder / "out.json")
    assert (found.num_ranks, found.num_wrong, found.memory) == (num_ranks, 0, "engine")
    assert found.engine.startswith("shm")
    assert [str(one.collective) for one in found.series] == NAMES
    for one in found.series:
        traits = TRAITS[one.collective]
        assert len(one.rows) == (2 if traits.has_data else 1)
        for row in one.rows:
            assert row.bytes % (4 * (num_ranks if traits.divided else 1)) == 0
            assert list(row.sides) == ["unidist", *(["named"] if traits.can_be_named else [])]
            for side in row.sides.values():
                assert 0 < side.min <= side.median <= side.p99
                assert side.wrong == (0 if traits.has_data else None)
    rows = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(rows) == 2 * 6 + 1
    assert f"{num_ranks} ranks" in done.stdout


@pytest.mark.parallel
@pytest.mark.slow
@pytest.mark.parametrize("peers", ["gloo", "gloo,mpi"])
def test_peers_take_turns_with_ours_and_are_right_too(command: Command, peers: str) -> None:
    names = peers.split(",")
    for package in ("torch", "mpi4py")[: len(names)]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    options = ("--beside", peers, "--engine", "shm", "--json", "out.json", "-d", "int32", "-o", "max")
    done = command.run("bench", "all", "-np", "2", *QUICK, *options)
    assert done.returncode == 0, done.stderr
    found = read(command.folder / "out.json")
    assert list(found.beside) == names
    for one in found.series:
        for row in one.rows:
            assert list(row.sides) == ["unidist", *names]
    assert found.num_wrong == 0
    assert all("ratio" in line for line in done.stdout.splitlines() if " median " in line)


@pytest.mark.parallel
def test_in_place_and_ordinary_memory_and_a_plot(command: Command) -> None:
    pytest.importorskip("matplotlib")
    options = ("--in-place", "--memory", "ordinary", "--json", "out.json", "--plot", "out.svg")
    done = command.run("bench", "allgather", "reducescatter", "-np", "2", *QUICK, *options)
    assert done.returncode == 0, done.stderr
    found = read(command.folder / "out.json")
    assert found.memory == "ordinary"
    assert [one.in_place for one in found.series] == [True, True]
    assert found.num_wrong == 0
    assert "<svg" in (command.folder / "out.svg").read_text()


@pytest.mark.parallel
def test_wrong_results_are_counted_and_end_with_1(command: Command) -> None:
    (command.folder / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'unidist_bench.measurement.program' in sys.orig_argv:\n"
        "    from unidist_bench.measurement import ours\n"
        "    def silent(self, call):\n"
        "        return lambda: None\n"
        "    ours.CommunicatorSide.operation = silent\n"
    )
    path = str(command.folder)
    import os

    env = {"PYTHONPATH": f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = command.run("bench", "broadcast", "-np", "2", "-b", "1K", "-e", "1K", "--iterations", "2", env=env)
    assert done.returncode == 1
    assert "unidist: error: 256 elements were wrong, see #wrong" in done.stderr
    assert done.stdout.splitlines()[-1].split()[-1] == "256"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("allreduc",), "unknown collective 'allreduc'. Did you mean 'allreduce'"),
        (("--engine", "pigeon"), "unknown engine 'pigeon'"),
        (("-d", "float31"), "unknown dtype 'float31'"),
        (("-o", "mean"), "unknown op 'mean'"),
        (("-d", "complex64", "-o", "max"), "complex numbers have no order"),
        (("-b", "many"), "'many' is no size in bytes"),
        (("-b", "1M", "-e", "1K"), "is above --max-bytes"),
        (("-f", "2", "--step-bytes", "8"), "give one of them"),
        (("alltoall", "--in-place"), "alltoall cannot work in place"),
        (("sendrecv", "--named"), "sendrecv has no named operation"),
        (("--beside", "pigeon"), "unknown peer of --beside 'pigeon'"),
        (("--json", "nowhere/out.json"), "cannot be written"),
        (("--plot", "out.doc"), "ends in none of"),
        (("--strategy", "zero=1"), "No such option"),
        (("--min-np", "1"), "No such option"),
    ],
)
def test_what_cannot_be_measured_is_one_line_before_anything_starts(
    arguments: tuple[str, ...], text: str, command: Command
) -> None:
    done = command.run_here("bench", *arguments, "-np", "2")
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stdout == ""
    assert list(Path(command.folder).iterdir()) == []


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("-np", "1"), "one rank exchanges nothing"),
        (("-np", "2", "-e", "500T", "-f", "1000"), "available; lower --max-bytes"),
        (("broadcast", "-np", "2", "--root", "2"), "--root 2 is no rank; choices: 0 to 1"),
        (("-np", "2", "--engine", "gloo", "--memory", "engine"), "has no engine memory"),
        (
            ("-np", "2", "--beside", "gloo", "-d", "complex64", "-o", "prod"),
            "gloo: allreduce of complex64 with product",
        ),
    ],
)
def test_what_the_ranks_find_impossible_is_one_line_too(
    arguments: tuple[str, ...], text: str, command: Command
) -> None:
    if "gloo" in arguments and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    done = command.run("bench", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("unidist: error: ")
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


def ranks(command: Command) -> list[psutil.Process]:
    """Return the processes that are ranks by now."""
    return [each for each in command.alive() if "unidist_bench.measurement.program" in each.cmdline()]


@pytest.mark.parallel
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_command_and_leaves_nothing(command: Command, number: signal.Signals) -> None:
    with command.start("bench", "-np", "2", "-b", "8", "-e", "8", "--iterations", "100000000") as process:
        assert command.wait_until(lambda: len(ranks(command)) == 2, 60)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("# unidist")
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert command.wait_until(lambda: not command.alive(), 30)


@pytest.mark.parallel
def test_a_rank_that_is_killed_is_named_and_ends_the_command(command: Command) -> None:
    arguments = ("-b", "8", "-e", "8", "--iterations", "100000000", "--json", "out.json")
    with command.start("bench", "-np", "2", *arguments) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("# unidist")
        victim = next(each for each in ranks(command) if each.environ().get("RANK") == "1")
        victim.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 failed first" in errors
    assert "Traceback" not in errors
    assert not (command.folder / "out.json").exists()
