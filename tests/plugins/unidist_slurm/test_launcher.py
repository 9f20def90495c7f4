"""Jobs in allocations of a real Slurm, on this machine; and what its variables mean."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_lines import rank_lines
from slurm_cluster import SlurmCluster, why_not
from unidist_command import Command

from unidist.errors import ConfigurationError
from unidist.launcher import ElasticLimits, Host, Job
from unidist_slurm import allocation as slurm_allocation
from unidist_slurm.launcher import SlurmAgents, SlurmLauncher, SlurmNodeAgent

needs_slurm = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")
TIMEOUT_SEC = 120


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@pytest.mark.parametrize(
    ("variables", "slots"),
    [
        ({"SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_CPUS_PER_NODE": "64(x3)"}, (2, 2, 1)),
        ({"SLURM_TASKS_PER_NODE": "4,3,12"}, (4, 3, 12)),
        ({"SLURM_JOB_CPUS_PER_NODE": "8(x3)", "SLURM_CPUS_PER_TASK": "3"}, (2, 2, 2)),
        ({"SLURM_JOB_CPUS_PER_NODE": "2,8(x2)", "SLURM_CPUS_PER_TASK": "4"}, (1, 2, 2)),
    ],
)
def test_slots_are_the_tasks_that_were_asked_for(variables: dict[str, str], slots: tuple[int, ...]) -> None:
    hosts = slurm_allocation.read({"SLURM_JOB_NODELIST": "n1 n2 n3", **variables}, names)
    assert hosts == tuple(Host(f"n{i + 1}", number) for i, number in enumerate(slots))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "needs an allocation, and this is none"),
        (
            {"SLURM_JOB_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"},
            "this is task 3 of 4 that srun",
        ),
        ({"SLURM_JOB_NODELIST": "n1 n2", "SLURM_TASKS_PER_NODE": "2"}, "speaks of 1 nodes, .* of 2; were they changed"),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "2(x"}, r"SLURM_TASKS_PER_NODE='2\(x' cannot be read"),
        ({"SLURM_JOB_NODELIST": "n1"}, "SLURM_JOB_CPUS_PER_NODE='' cannot be read"),
    ],
)
def test_variables_that_cannot_be_are_told(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        slurm_allocation.read(variables, names)


def test_one_srun_for_all_nodes_whatever_sbatch_was_told_of_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "8")
    agents = SlurmAgents([Host("n2", 4), Host("n1", 3)])
    command = " ".join(agents.command(Host("n2", 4)))
    assert command.startswith("srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --nodelist n2,n1 ")
    assert agents.indices == {"n2": 0, "n1": 1}
    assert [name for name in agents.environment() if name.startswith("SLURM_") and "CONF" not in name] == [
        "SLURM_JOB_ID"
    ]


def test_an_srun_of_its_own_for_each_node_of_an_elastic_job() -> None:
    command = " ".join(SlurmNodeAgent().command(Host("n2", 4)))
    assert command.startswith("srun --nodes 1 --ntasks 1 --nodelist n2 --overlap ")
    assert not SlurmNodeAgent().index_variable


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ElasticLimits(1, 2, discovery_script="./hosts"), "leave --host-discovery-script out"),
        (ElasticLimits(1, 2, state_dir=Path("state")), "leave --state-dir out. With --checkpoint-dir"),
    ],
)
def test_what_an_elastic_job_cannot_do_in_an_allocation_is_refused(
    limits: ElasticLimits, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlurmLauncher, "hosts", lambda self: (Host("n1", 2),))
    with pytest.raises(ConfigurationError, match=message):
        SlurmLauncher().run(Job(("true",), 2, elastic=limits))


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("srun: error: Unable to confirm allocation for job 9: Invalid job id specified", "the allocation has ended"),
        ("slurmstepd-n1: error: execve(): /x/python: No such file or directory", "does not exist there"),
        ("srun: error: Node failure on n2", "a node has failed"),
        ("srun: error: Unable to create step for job 8: More processors requested", "Slurm gives no step there"),
        ("unidist-agent: error: folder 'x' cannot be entered", "folder 'x' cannot be entered"),
        ("srun: banana", "srun ended with exit code 1: srun: banana"),
    ],
)
def test_a_failure_of_srun_is_told_in_words(text: str, meaning: str) -> None:
    assert meaning in SlurmAgents([Host("n1", 1)]).explain(Host("n1", 1), 1, text)


def test_outside_of_an_allocation_it_says_how_to_get_one(command: Command) -> None:
    done = command.run(
        "launch", "-np", "1", "--launcher", "slurm", command.script(""), env={"PATH": os.environ["PATH"]}
    )
    assert done.returncode == 2
    assert "needs an allocation, and this is none" in done.stderr
    assert "`salloc`" in done.stderr


def test_slurms_variables_without_slurms_programs_are_told(command: Command, tmp_path: Path) -> None:
    variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "1", "PATH": str(tmp_path)}
    done = command.run("launch", command.script(""), env=variables)
    assert done.returncode == 2
    assert "there is no `scontrol` on the PATH" in done.stderr


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster() as made:
        yield made


class Allocation:
    """Runs commands by salloc, or whatever comes before them, in a folder of their own."""

    def __init__(self, command: Command, cluster: SlurmCluster) -> None:
        self.command = command
        self.cluster = cluster

    def start(self, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words,
            cwd=self.command.folder,
            env={**self.cluster.env, "TEST_MARK": self.command.mark, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def launch(self, *arguments: str, tasks: int = 3) -> subprocess.Popen[str]:
        """Start `unidist launch ARGUMENTS` in an allocation of its own."""
        salloc = ("salloc", "--quiet", "--ntasks", str(tasks))
        return self.start(*salloc, sys.executable, "-m", "unidist_launch", "launch", *arguments)

    def wait_for(self, *files: str) -> None:
        assert self.command.wait_until(lambda: all((self.command.folder / name).exists() for name in files), 60), files

    def is_empty(self) -> bool:
        """Return whether nothing of it runs any more."""
        return not self.command.alive() and not self.cluster.steps()


@pytest.fixture
def allocation(command: Command, cluster: SlurmCluster) -> Allocation:
    return Allocation(command, cluster)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    with process:
        try:
            out, err = process.communicate(timeout=TIMEOUT_SEC)
        except BaseException:
            process.kill()
            raise
    return process.returncode, sorted(out.splitlines()), err


WAIT = """
    def leave(number, frame):
        open(f"left{rank}", "w").write(str(number))
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    open(f"ready{rank}", "w")
    for _ in range(3000): time.sleep(0.1)
"""


@needs_slurm
def test_an_allocation_is_recognised_and_its_tasks_are_the_ranks(allocation: Allocation) -> None:
    script = allocation.command.script("""
        env = os.environ
        print(env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["UNIDIST_NUM_NODES"], env["GIVEN"],
              env["UNIDIST_STRATEGY"], "SLURM_JOB_ID" in env)
        secret = os.pread(int(env["UNIDIST_SECRET_FD"]), 32, 0)
        seen = b""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("cmdline", "environ"):
                try:
                    seen += open(f"/proc/{pid}/{name}", "rb").read()
                except OSError:
                    pass
        assert b"srun" in seen
        assert len(secret) == 32 and secret not in seen and secret.hex().encode() not in seen
    """)
    code, lines, err = ended(allocation.launch("--env", "GIVEN=g", "--strategy", "accumulate=2", script))
    assert code == 0, err
    assert lines == [f"[{rank}] {rank} 3 {rank} 1 g accumulate=2 True" for rank in range(3)]
    assert allocation.command.wait_until(allocation.is_empty, 60)


@needs_slurm
def test_ranks_of_the_launcher_and_of_plain_srun_meet_and_reduce(allocation: Allocation) -> None:
    script = allocation.command.script("""
        from unidist.runtime import context
        from unidist.buffer import Buffer
        import array
        world = context.init().world
        values, sums = array.array("d", [world.rank + 1.0] * 1000), array.array("d", [0.0] * 1000)
        world.allreduce(Buffer.of(values), Buffer.of(sums)).wait()
        print(world.description, set(sums), flush=True)
        context.shutdown()
    """)
    code, lines, err = ended(allocation.launch("-np", "2", script))
    assert code == 0, err
    assert rank_lines("\n".join(lines)) == {rank: ["shm, ranks 0, 1 {3.0}"] for rank in range(2)}
    code, lines, err = ended(allocation.start("srun", "--ntasks", "2", sys.executable, script))
    assert code == 0, err
    assert lines == ["shm, ranks 0, 1 {3.0}"] * 2


@needs_slurm
def test_the_first_failure_decides_report_and_exit_code(allocation: Allocation) -> None:
    script = allocation.command.script("sys.exit(7) if rank == 1 else time.sleep(60)")
    code, _, err = ended(allocation.launch(script))
    assert code == 7
    assert f"unidist: rank 1 failed first (host {allocation.cluster.nodes[0]}, pid " in err
    assert "unidist: ended by the launcher: ranks 0,2" in err


@needs_slurm
def test_a_written_script_is_what_sbatch_takes(allocation: Allocation) -> None:
    script = allocation.command.script("print(os.environ['WORLD_SIZE'], os.environ['SET'], sys.argv[1]); sys.exit(5)")
    written = allocation.command.run(
        *("slurm", "script", "--ntasks-per-node", "2", "--time", "5", "--partition", "test", "--output", "out.txt"),
        *(
            "--setup",
            "export SET='a b'",
            "--sbatch",
            "--comment=x",
            "--",
            "--strategy",
            "accumulate=2",
            script,
            "--lr 1",
        ),
    )
    assert written.returncode == 0, written.stderr
    (allocation.command.folder / "job.sh").write_text(written.stdout)
    code, _, err = ended(allocation.start("sbatch", "--wait", "job.sh"))
    out = (allocation.command.folder / "out.txt").read_text()
    assert code == 5, err + out
    assert rank_lines(out) == {rank: ["2 a b --lr 1"] for rank in range(2)}
    assert "failed first" in out


@needs_slurm
def test_scancel_gives_the_ranks_time_to_leave(allocation: Allocation) -> None:
    script = allocation.command.script(WAIT)
    written = allocation.command.run("slurm", "script", "--ntasks-per-node", "2", "--output", "out.txt", script)
    (allocation.command.folder / "job.sh").write_text(written.stdout)
    with allocation.start("sbatch", "--wait", "--parsable", "job.sh") as waiting:
        try:
            allocation.wait_for("ready0", "ready1")
            assert allocation.cluster.steps()
        finally:
            allocation.cluster.run("scancel", *allocation.cluster.jobs())
            waiting.communicate(timeout=TIMEOUT_SEC)
    assert allocation.command.wait_until(allocation.is_empty, 60), allocation.command.alive()
    left = [(allocation.command.folder / f"left{rank}").read_text() for rank in range(2)]
    assert left == ["15", "15"], (allocation.command.folder / "out.txt").read_text()


@needs_slurm
@pytest.mark.parametrize("victim", ["unidist_launch launch", "unidist_launch.agent.agent", "srun "])
def test_nothing_is_left_after_kill_9(allocation: Allocation, victim: str) -> None:
    script = allocation.command.script(WAIT)
    with allocation.launch("--grace-period", "1", script, tasks=2) as salloc:
        try:
            allocation.wait_for("ready0", "ready1")
            lines = {each: " ".join(each.cmdline()) for each in allocation.command.alive()}
            next(each for each, line in lines.items() if victim in line and not line.startswith("salloc")).kill()
            salloc.communicate(timeout=TIMEOUT_SEC)
        finally:
            salloc.terminate()
    assert allocation.command.wait_until(allocation.is_empty, 60), allocation.command.alive()


@needs_slurm
def test_what_the_allocation_cannot_give_is_told(allocation: Allocation) -> None:
    script = allocation.command.script("open('ran', 'w')")
    code, _, err = ended(allocation.launch("-np", "9", script, tasks=2))
    assert code == 2
    assert f"-np 9 needs 9 slots, but {allocation.cluster.nodes[0]}:2 gives 2" in err
    code, _, err = ended(allocation.launch("-np", "1", "-H", "n9:1", "--launcher", "slurm", script, tasks=2))
    assert code == 2
    assert "host n9 is not in this allocation" in err
    code, _, err = ended(
        allocation.start("srun", "--ntasks", "2", sys.executable, "-m", "unidist_launch", "launch", script)
    )
    assert code == 2
    assert "of 2 that srun has started" in err
    launch = (sys.executable, "-m", "unidist_launch", "launch", script)
    code, _, err = ended(allocation.start("salloc", "env", "SLURM_JOB_NODELIST=n[1-", *launch))
    assert code == 2
    assert "SLURM_JOB_NODELIST='n[1-' is no node list" in err
    assert not (allocation.command.folder / "ran").exists()


@needs_slurm
def test_an_evaluator_runs_in_the_allocation_without_a_place_among_the_ranks(allocation: Allocation) -> None:
    evaluate = allocation.command.script(
        """
        import unidist.horovod_api as ud
        ud.init()
        open("evaluating", "w").write(f"{ud.role()} {ud.size()} {'SLURM_PROCID' in os.environ}")
        ud.shutdown()
    """,
        "evaluate.py",
    )
    script = allocation.command.script("while not os.path.exists('evaluating'): time.sleep(0.05)")
    code, _, err = ended(allocation.launch("--evaluator", evaluate, script, tasks=2))
    assert code == 0, err
    assert (allocation.command.folder / "evaluating").read_text() == "evaluator 1 False"
    assert allocation.command.wait_until(allocation.is_empty, 60)
