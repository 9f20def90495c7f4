"""Options of `unidist launch`: what they become on the ranks, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from nvidia_driver import build_nvml
from unidist_command import Command

pytestmark = pytest.mark.parallel

SHOW = "import json; print('ENV', json.dumps({k: v for k, v in os.environ.items()}))"


def shown(command: Command, *options: str, env: dict[str, str] | None = None) -> dict[str, str]:
    """Launch one rank with these options and return its environment."""
    done = command.run("launch", "-np", "1", *options, command.script(SHOW), env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout.partition("ENV ")[2])
    return found


def planned(command: Command, *options: str, env: dict[str, str] | None = None) -> dict[str, str]:
    """Return the environment that one rank with these options would have, but for what the launcher itself adds."""
    job, _ = command.job_here("launch", "-np", "1", *options, command.script(SHOW), env=env)
    return {**os.environ, **(env or {}), **job.env}


def test_options_become_variables_of_the_ranks(command: Command) -> None:
    env = shown(
        command,
        *("--strategy", "identity", "--engine", "auto", "--allreduce-algorithm", "ring", "--timeline", "t.%r.json"),
        *("--timeout", "30", "--start-timeout", "7.5", "--stall-check", "0", "--env", "A=b=c", "--env", "EMPTY="),
    )
    assert env["UNIDIST_STRATEGY"] == "identity"
    assert env["UNIDIST_ENGINE"] == "auto"
    assert env["UNIDIST_ALLREDUCE_ALGORITHM"] == "ring"
    assert env["UNIDIST_TIMELINE"] == str(command.folder / "t.%r.json")
    assert (env["UNIDIST_TIMEOUT_SEC"], env["UNIDIST_START_TIMEOUT_SEC"], env["UNIDIST_STALL_CHECK_SEC"]) == (
        "30",
        "7.5",
        "0",
    )
    assert (env["A"], env["EMPTY"]) == ("b=c", "")


def test_without_options_nothing_is_chosen_for_the_user(command: Command) -> None:
    chosen = {name for name in shown(command) if name.startswith("UNIDIST_")}
    places = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NUM_NODES"}
    assert chosen == {f"UNIDIST_{name}" for name in places | {"JOB_ID", "SECRET_FD", "PROCESS_FD", "LAUNCHER_PID"}}


def test_python_does_not_buffer_whatever_wraps_it(command: Command) -> None:
    assert shown(command)["PYTHONUNBUFFERED"] == "1"
    assert shown(command, env={"PYTHONUNBUFFERED": ""})["PYTHONUNBUFFERED"] == ""


def test_option_wins_over_env_option_over_environment(command: Command) -> None:
    ambient, options = {"UNIDIST_TIMEOUT_SEC": "1"}, ("--env", "UNIDIST_TIMEOUT_SEC=2", "--timeout", "3")
    assert planned(command, env=ambient)["UNIDIST_TIMEOUT_SEC"] == "1"
    assert planned(command, *options[:2], env=ambient)["UNIDIST_TIMEOUT_SEC"] == "2"
    assert planned(command, *options, env=ambient)["UNIDIST_TIMEOUT_SEC"] == "3"
    assert shown(command, *options, env=ambient)["UNIDIST_TIMEOUT_SEC"] == "3"


def test_env_with_a_name_alone_wants_it_set(command: Command) -> None:
    assert planned(command, "--env", "HAVE", env={"HAVE": "x"})["HAVE"] == "x"
    done = command.run_here("launch", "-np", "1", "--env", "HAVE_NOT", "true")
    assert done.returncode == 2
    assert "--env 'HAVE_NOT'" in done.stderr


def test_disabled_plugins_add_up_and_reach_the_ranks(command: Command) -> None:
    env = shown(command, "-p", "no:torch", "-p", "no:accumulate", env={"UNIDIST_DISABLE_PLUGINS": "accumulate"})
    assert env["UNIDIST_DISABLE_PLUGINS"] == "accumulate,torch"


def test_arguments_after_the_command_are_the_commands_own(command: Command) -> None:
    done = command.run("launch", "-np", "1", command.script("print(sys.argv[1:])"), "-np", "9", "--quiet", "--", "-h")
    assert done.stdout == "[0] ['-np', '9', '--quiet', '--', '-h']\n"
    command.script("print(sys.argv[1:])", "mod.py")
    done = command.run("launch", "-np", "1", "-m", "mod", "--lr", "1")
    assert done.stdout == "[0] ['--lr', '1']\n"
    done = command.run("launch", "-n", "2", "bash", "-c", "echo $RANK $0", "x")
    assert sorted(done.stdout.splitlines()) == ["[0] 0 x", "[1] 1 x"]


@pytest.mark.parametrize("name", ["job.yaml", "job.toml"])
def test_a_config_file_gives_options_and_the_command_line_wins(command: Command, name: str) -> None:
    text = {
        "job.yaml": "num-proc: 3\ntimeout: 5\nstall_check: 6\nenv: {A: 1, B: 2}\nplugin: no:torch\nquiet: true\n",
        "job.toml": "num-proc = 3\ntimeout = 5\nstall_check = 6\nenv = {A = 1, B = 2}\nplugin = ['no:torch']\n"
        "quiet = true\n",
    }
    (command.folder / name).write_text(text[name])
    line = ("launch", "--timeout", "9", "--env", "B=3", "--config", name, command.script(SHOW))
    job, _ = command.job_here(*line)
    assert (job.num_proc, job.quiet) == (3, True)
    env = job.env
    assert (env["UNIDIST_TIMEOUT_SEC"], env["UNIDIST_STALL_CHECK_SEC"]) == ("9", "6")
    assert (env["A"], env["B"], env["UNIDIST_DISABLE_PLUGINS"]) == ("1", "3", "torch")
    if name == "job.yaml":
        done = command.run(*line)
        assert done.returncode == 0, done.stderr
        ranks = json.loads(done.stdout.partition("ENV ")[2])  # quiet: of one rank only
        assert {"WORLD_SIZE": "3", **env}.items() <= ranks.items()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "shmm"), "unknown engine 'shmm'. Did you mean 'shm'? Choices: "),
        (("--engine", "single"), "engine 'single' cannot be used for 2 processes"),
        (("--nproc-per-node", "4"), "--nproc-per-node is an option of torchrun; write -np 4"),
        (("--nproc_per_node=gpu",), "is an option of torchrun; write -np N"),
        (("--nnodes=2",), "name all hosts by -H"),
        (("--strategy", "identty"), "unknown strategy 'identty'. Did you mean 'identity'? Choices: "),
        (("--strategy", "identity=3"), "takes no value"),
        (("--strategy", "=2"), "cannot be read. Syntax"),
        (("--allreduce-algorithm", "rings"), "unknown all-reduce algorithm 'rings'. Did you mean 'ring'?"),
        (("--launcher", "locale"), "unknown launcher 'locale'. Did you mean 'local'?"),
        (("-p", "no:launhc"), "unknown plugin 'launhc'. Did you mean 'launch'?"),
        (("-p", "launch"), "-p 'launch': write no:NAME"),
        (("-p", "no:launch"), "unknown launcher 'local'"),
        (("--timeout", "0"), "'--timeout'"),
        (("--timeout", "soon"), "'soon' is not a number; give more than 0"),
        (("--grace-period", "-1"), "'--grace-period'"),
        (("--timeline", "no/such/folder/t.json"), "does not exist"),
        (("--output-dir", "script.py"), "--output-dir 'script.py' cannot be used"),
        (("--env", "UNIDIST_RANK=3"), "UNIDIST_RANK: set by the launcher"),
        (("--env", "UNIDIST_TIMEOUT_SEC=x"), "UNIDIST_TIMEOUT_SEC='x' is not a number"),
        (("--verbose", "--quiet"), "exclude each other"),
        (("-H", "localhost:2", "--hostfile", "f"), "-H and --hostfile exclude each other"),
        (("--hostfile", "no_hosts"), "--hostfile 'no_hosts' cannot be read"),
        (("--launcher", "ssh"), "the ssh launcher needs to know the hosts"),
        (("--launcher", "local", "-H", "node9:2"), "host 'node9' is not this one"),
        (("-H", "node9:2", "--ssh-command", "no-such-ssh"), "there is no such program here"),
        (("-H", "node9:2", "--ssh-identity-file", "no_key"), "--ssh-identity-file 'no_key' does not exist"),
        (
            ("-H", "node9:1,node8:1", "--engine", "shm"),
            "engine 'shm' cannot be used for 2 processes: connects one host",
        ),
        (
            ("-H", "node9:1,node8:1", "--engine", "gloo", "--tls"),
            "--tls: engine 'gloo' does not encrypt what it sends to other hosts; those that do: ",
        ),
        (("--config", "none.yaml"), "cannot be read"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    command: Command, options: tuple[str, ...], message: str
) -> None:
    script = command.script("open('started', 'w')")
    done = command.run_here("launch", "-np", "2", *options, script)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (command.folder / "started").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--engine", "mpi"),
            "engine 'mpi' cannot be used for 2 processes: these 2 processes were not started by mpirun",
        ),
        (
            ("--engine", "nccl", "--env", "CUDA_VISIBLE_DEVICES="),
            "engine 'nccl' cannot be used on this machine: no CUDA device is visible to torch",
        ),
    ],
)
def test_engines_that_are_asked_in_a_process_are_refused_before_a_rank_starts(
    command: Command, options: tuple[str, ...], message: str
) -> None:
    script = command.script("open('started', 'w')")
    done = command.run("launch", "-np", "2", *options, script)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (command.folder / "started").exists()


def test_an_engine_that_the_environment_asks_for_must_be_usable(command: Command) -> None:
    script = command.script("open('started', 'w')")
    done = command.run("launch", "-np", "2", script, env={"UNIDIST_ENGINE": "nccl", "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "unidist: error: engine 'nccl' cannot be used on this machine: no CUDA device is visible to torch"
    ]
    assert not (command.folder / "started").exists()


def test_without_a_number_there_is_a_rank_for_each_device_or_core(command: Command, tmp_path: Path) -> None:
    script = command.script("print(os.environ['WORLD_SIZE']) if rank == 0 else None")
    cores = len(os.sched_getaffinity(0))
    done = command.run("launch", script, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.stdout == f"[0] {cores}\n"
    assert f"unidist: -np is not given: {cores}, the number of this machine's cores" in done.stderr
    build_nvml(tmp_path, num_devices=3)
    driver = {"LD_LIBRARY_PATH": str(tmp_path)}
    done = command.run("launch", "-q", script, env={**driver, "CUDA_VISIBLE_DEVICES": ""})
    assert (done.stdout, done.stderr) == (f"[0] {cores}\n", "")
    done = command.run("launch", script, env=driver)
    assert done.stdout == "[0] 3\n"
    assert "the number of this machine's devices" in done.stderr
    done = command.run("launch", "-q", script, env={**driver, "CUDA_VISIBLE_DEVICES": "2,0"})
    assert done.stdout == "[0] 2\n"
    done = command.run("launch", "-q", "-H", "localhost:4", script)
    assert done.stdout == "[0] 4\n"


@pytest.mark.parametrize(
    ("given", "number"),
    [(("-np", "2"), "2"), (("--lr", "1", "-np=3"), "3"), (("--nproc_per_node=4",), "4"), (("--num-proc",), "N")],
)
def test_a_number_of_processes_after_the_script_is_refused(
    command: Command, given: tuple[str, ...], number: str
) -> None:
    script = command.script("open('started', 'w')")
    done = command.run_here("launch", script, *given)
    assert done.returncode == 2
    assert f"`unidist launch -np {number} script.py`" in done.stderr
    assert not (command.folder / "started").exists()
    job, _ = command.job_here("launch", "-np", "1", script, *given)
    assert job.command[-len(given) :] == given


def test_an_unknown_option_in_a_file_suggests_the_nearest(command: Command) -> None:
    (command.folder / "job.yaml").write_text("num_prok: 2\n")
    done = command.run_here("launch", "--config", "job.yaml", "true")
    assert done.returncode == 2
    assert "job.yaml: unknown option 'num_prok'. Did you mean 'num-proc'?" in done.stderr


def test_a_misspelt_variable_is_a_warning(command: Command) -> None:
    _, done = command.job_here("launch", "-np", "1", "true", env={"UNIDIST_STRATGY": "x", "UNIDIST_PIGEON_SPEED": "3"})
    assert "warning: variable UNIDIST_STRATGY is not one of unidist's; did you mean UNIDIST_STRATEGY?" in done.stderr
    assert "PIGEON" not in done.stderr


def test_verbose_tells_what_is_started_and_how_it_ended(command: Command) -> None:
    done = command.run(
        "launch", "-np", "2", "--verbose", command.script("print(rank, os.environ['UNIDIST_LOG_LEVEL'])")
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 0 info", "[1] 1 info"]
    assert "unidist: 2 x " in done.stderr
    assert "unidist: rank 1 is process " in done.stderr
    assert "unidist: rank 1 ended: exit code 0" in done.stderr
