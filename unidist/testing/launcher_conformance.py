"""The conformance suite of launchers: subclass it, name your launcher, run pytest.

    from unidist.testing import LauncherConformance

    class TestMyLauncher(LauncherConformance):
        launcher = "mine"

Each test starts a small job in a separate process. Ranks write to a folder, so hosts other than this one need the
same file system and Python. The contract is that of `unidist.launcher`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from unidist.launcher import LauncherSpec, StartsSideProcesses
from unidist.registry import load_object
from unidist.runtime.plugin_manager import PluginManager
from unidist.testing._launcher_side import REFUSED

_HEAD = """
import json, os, pathlib, signal, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def here(text="", name="here"):
    pathlib.Path(f"{name}.{rank}.new").write_text(text)
    os.rename(f"{name}.{rank}.new", f"{name}.{rank}")
def wait_for_all(name="here"):
    while not all(pathlib.Path(f"{name}.{each}").exists() for each in range(size)):
        time.sleep(0.01)
"""
_HEAD_BESIDE = """
import json, os, pathlib, signal, sys, time
from datetime import timedelta
from unidist.control import job_values
"""
_MARK = "LAUNCHER_CONFORMANCE_MARK"
_SLEEP_SEC = 300


class LauncherConformance:
    """See the module's text. Each attribute may be replaced in a subclass.

    Attributes:
        launcher: the launcher's registered name.
        path: "module:Class" of the launcher; default: as it is registered.
        num_proc: ranks of a job.
        hosts: names and slots, as `Job.hosts`; empty: this host.
        prefix: how each line of a rank begins.
        writes_output_dir: it writes `rank.R/stdout` and `rank.R/stderr` into `Job.output_dir`.
        limit_sec: the longest that a job may take to start, and to end.
    """

    launcher: ClassVar[str] = ""
    path: ClassVar[str] = ""
    num_proc: ClassVar[int] = 2
    hosts: ClassVar[Sequence[tuple[str, int]]] = ()
    prefix: ClassVar[str] = "[{rank}] "
    writes_output_dir: ClassVar[bool] = True
    limit_sec: ClassVar[float] = 60.0

    @pytest.fixture(autouse=True)
    def _use_folder(self, tmp_path: Path) -> Iterator[None]:
        self.set_up(tmp_path)
        yield
        self.tear_down()

    def set_up(self, folder: Path) -> None:
        """Choose where jobs run; called before each test."""
        self.folder = folder
        self._mark = uuid.uuid4().hex

    def tear_down(self) -> None:
        """Look for what jobs have left, and end it; called after each test."""
        left = self._wait_for_end()
        for process in left:
            process.kill()
        assert not left, f"the launcher has ended, and these processes of its job have not: {left}"

    # What the tests use

    def job(self, script: str, *arguments: str, **more: Any) -> dict[str, Any]:
        """Return the description of a job in which every rank runs a script."""
        (self.folder / "script.py").write_text(_HEAD + textwrap.dedent(script))
        command = [sys.executable, str(self.folder / "script.py"), *arguments]
        env = {_MARK: self._mark, **more.pop("env", {})}
        return {
            "path": self.path or self._spec().path,
            "command": command,
            "num_proc": self.num_proc,
            "hosts": list(self.hosts),
            "output_dir": "",
            **more,
            "env": env,
        }

    def start(self, job: Mapping[str, Any]) -> subprocess.Popen[str]:
        """Start a job."""
        places = os.pathsep.join(path for path in sys.path if path)
        return subprocess.Popen(
            [sys.executable, "-m", "unidist.testing._launcher_side", json.dumps(job)],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": places, _MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )

    def run(self, job: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
        """Run a job to its end."""
        with self.start(job) as process:
            return self._finish(process)

    def _finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        try:
            out, err = process.communicate(timeout=self.limit_sec)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def _wait_for_ranks(self, name: str = "here") -> None:
        files = [self.folder / f"{name}.{rank}" for rank in range(self.num_proc)]
        if not self._wait_until(lambda: all(file.exists() for file in files)):
            raise AssertionError(f"not every rank came to {name!r} within {self.limit_sec:g} s")

    def _wait_until(self, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + self.limit_sec
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self._mark:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _wait_for_end(self) -> list[psutil.Process]:
        deadline = time.monotonic() + min(10.0, self.limit_sec)
        while (left := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _spec(self) -> LauncherSpec:
        found: LauncherSpec = PluginManager().load().registry(LauncherSpec).get(self.launcher)
        return found

    def _beside(self, script: str, index: int = 0, **more: Any) -> dict[str, Any]:
        """Return a process beside the ranks, for launchers that start such processes; the others skip the test."""
        launcher = load_object(self.path, "the launcher")() if self.path else self._spec().load()
        if not isinstance(launcher, StartsSideProcesses):
            pytest.skip(f"{self.launcher} starts ranks alone")
        name = f"beside{index}.py"
        (self.folder / name).write_text(_HEAD_BESIDE + textwrap.dedent(script))
        return {"command": [sys.executable, str(self.folder / name)], "role": "ps", "index": index, **more}

    # The contract

    def test_it_can_be_used_here(self) -> None:
        availability = self._spec().load().availability()
        assert availability.usable, availability.reason

    def test_every_rank_knows_its_place_and_has_the_jobs_variables(self) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "EXTRA")
        script = f"here(json.dumps([sys.argv[1:], *(os.environ.get(name) for name in {names})]))"
        done = self.run(self.job(script, "--flag", "a b", env={"EXTRA": "1 2"}))
        assert done.returncode == 0, done.stderr
        places = set()
        for rank in range(self.num_proc):
            arguments, *values = json.loads((self.folder / f"here.{rank}").read_text())
            assert arguments == ["--flag", "a b"], f"rank {rank} got the arguments {arguments}"
            assert values[:2] == [str(rank), str(self.num_proc)], (
                f"rank {rank} has {dict(zip(names, values, strict=True))}"
            )
            assert values[4] == "1 2", f"rank {rank} lacks the variable of the job: {values[4]!r}"
            assert 0 <= int(values[2]) < int(values[3]), f"rank {rank} has {dict(zip(names, values, strict=True))}"
            places.add((values[2], values[3]))
        if not self.hosts:
            assert len(places) == self.num_proc, "two ranks of one host have one local rank"

    def test_the_ranks_meet(self) -> None:
        script = """
        from unidist.buffer import Buffer, DType
        from unidist.runtime import context
        world = context.init().world
        total = Buffer.allocate(1, DType.INT64)
        total.bytes().cast("q")[0] = rank + 1
        world.allreduce(total, total).wait()
        here(str(total.bytes().cast("q")[0]))
        context.shutdown()
        """
        done = self.run(self.job(script))
        assert done.returncode == 0, done.stderr
        wanted = str(sum(range(1, self.num_proc + 1)))
        found = [(self.folder / f"here.{rank}").read_text() for rank in range(self.num_proc)]
        assert found == [wanted] * self.num_proc, f"the ranks added up their numbers to {found}, not to {wanted}"

    def test_each_line_of_output_says_whose_it_is(self) -> None:
        done = self.run(self.job("print('from rank', rank); print('no newline', rank, end='')"))
        for rank in range(self.num_proc):
            for text in (f"from rank {rank}", f"no newline {rank}"):
                line = self.prefix.format(rank=rank) + text
                assert line in done.stdout.splitlines(), f"{line!r} is not in the output:\n{done.stdout}"

    def test_output_files_are_byte_for_byte(self) -> None:
        if not self.writes_output_dir:
            pytest.skip(f"{self.launcher} does not promise it")
        script = r"sys.stdout.buffer.write(b'a\xff\r\nb%d' % rank); sys.stderr.write('e')"
        done = self.run(self.job(script, output_dir=str(self.folder / "made" / "here")))
        assert done.returncode == 0, done.stderr
        for rank in range(self.num_proc):
            files = self.folder / "made" / "here" / f"rank.{rank}"
            assert (files / "stdout").read_bytes() == b"a\xff\r\nb%d" % rank
            assert (files / "stderr").read_bytes() == b"e"

    @pytest.mark.parametrize(
        ("last_act", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL)]
    )
    def test_the_rank_that_fails_first_decides_the_exit_code_and_the_others_end(self, last_act: str, code: int) -> None:
        script = f"""
        here()
        wait_for_all()
        if rank == size - 1:
            {last_act}
        time.sleep({_SLEEP_SEC})
        """
        done = self.run(self.job(script))
        assert done.returncode == code, f"exit code {done.returncode} instead of {code}:\n{done.stderr}"

    def test_a_signal_reaches_every_rank(self) -> None:
        script = f"""
        def leave(number, frame):
            here(name="told")
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        here()
        time.sleep({_SLEEP_SEC})
        """
        with self.start(self.job(script)) as process:
            self._wait_for_ranks()
            process.send_signal(signal.SIGTERM)
            self._finish(process)
        assert process.returncode == 128 + signal.SIGTERM, f"exit code {process.returncode} after SIGTERM"
        told = [rank for rank in range(self.num_proc) if (self.folder / f"told.{rank}").exists()]
        assert told == list(range(self.num_proc)), f"SIGTERM reached ranks {told} of {self.num_proc}"

    def test_what_ranks_leave_in_the_background_ends_with_the_job(self) -> None:
        script = f"""
        import subprocess
        subprocess.Popen(["sleep", "{_SLEEP_SEC}"])
        here()
        """
        done = self.run(self.job(script))
        assert done.returncode == 0, done.stderr
        assert not self._wait_for_end(), "what a rank has left in the background outlives the job"

    def test_nothing_is_left_when_the_launcher_is_killed(self) -> None:
        with self.start(self.job(f"here()\ntime.sleep({_SLEEP_SEC})")) as process:
            self._wait_for_ranks()
            process.kill()
            process.wait()  # not for its pipes: what is left would hold them open
            assert self._wait_until(lambda: not self._alive()), f"left behind: {self._alive()}"

    def test_a_program_that_does_not_exist_is_an_error(self) -> None:
        done = self.run({**self.job(""), "command": ["/there/is/no/such/program"]})
        assert done.returncode != 0, "a job whose program does not exist has succeeded"
        assert "/there/is/no/such/program" in done.stderr, f"the message does not name the program:\n{done.stderr}"
        assert done.returncode == REFUSED or "Traceback" not in done.stderr, done.stderr

    # Processes beside the ranks

    def test_ranks_and_the_processes_beside_them_find_each_other(self) -> None:
        server = """
        assert "RANK" not in os.environ, os.environ["RANK"]
        index = os.environ["UNIDIST_ROLE_INDEX"]
        values = job_values()
        values.set(f"ps/{index}", f"{os.environ['UNIDIST_HOST_ADDRESS']} {os.environ['EXTRA']}".encode())
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("asked to end")))
        ranks = values.wait([f"rank/{each}" for each in range(int(os.environ["NUM"]))], timedelta(seconds=60))
        print("role", os.environ["UNIDIST_ROLE"], index, sorted(map(bytes.decode, ranks)))
        values.set(f"said/{index}", b"")
        time.sleep(300)
        """
        env = {"NUM": str(self.num_proc)}
        beside = [self._beside(server, index, env=env) for index in range(2)]
        script = """
        from datetime import timedelta
        from unidist.control import job_values
        assert "UNIDIST_ROLE" not in os.environ
        values = job_values()
        values.set(f"rank/{rank}", str(rank).encode())
        here(" ".join(map(bytes.decode, values.wait(["ps/0", "ps/1"], timedelta(seconds=60)))))
        values.wait(["said/0", "said/1"], timedelta(seconds=60))  # else they are asked to end before
        """
        done = self.run(self.job(script, env={"EXTRA": "more"}, side_processes=beside))
        assert done.returncode == 0, done.stderr
        for rank in range(self.num_proc):
            address, more, _, also = (self.folder / f"here.{rank}").read_text().split()
            assert address, "a process beside the ranks does not know its host's address"
            assert (more, also) == ("more", "more"), "a process beside the ranks lacks the variables of the job"
        wanted = [str(rank) for rank in range(self.num_proc)]
        for index in range(2):
            lines = (f"[ps {index}] role ps {index} {wanted}", f"[ps {index}] asked to end")
            for line in lines:
                assert line in (done.stdout + done.stderr).splitlines(), f"{line!r} is not shown:\n{done.stderr}"

    def test_tensorflow_tools_learn_the_processes_of_a_job_from_tf_config(self) -> None:
        write = "pathlib.Path(f'config.ps.{os.environ[\"UNIDIST_ROLE_INDEX\"]}').write_text(os.environ['TF_CONFIG'])"
        beside = [self._beside(f"{write}\njob_values().set('ready', b'')", 0)]
        script = """
        from datetime import timedelta
        from unidist.control import job_values
        job_values().wait(["ready"], timedelta(seconds=60))
        here(os.environ["TF_CONFIG"], name="config")
        """
        done = self.run(self.job(script, side_processes=beside))
        assert done.returncode == 0, done.stderr
        configs = [json.loads((self.folder / f"config.{rank}").read_text()) for rank in range(self.num_proc)]
        configs.append(json.loads((self.folder / "config.ps.0").read_text()))
        assert [each["task"]["type"] for each in configs] == ["worker"] * self.num_proc + ["ps"]
        assert [each["task"]["index"] for each in configs] == [*range(self.num_proc), 0]
        cluster = configs[0]["cluster"]
        assert all(each["cluster"] == cluster for each in configs), configs
        addresses = [*cluster["worker"], *cluster["ps"]]
        assert len(set(addresses)) == self.num_proc + 1, addresses
        assert all(each.rpartition(":")[2].isdigit() for each in addresses), addresses

    def test_a_tf_config_of_the_user_stays(self) -> None:
        self._beside("")
        script = "here(os.environ.get('TF_CONFIG', ''), name='config')"
        for env, beside in (({}, []), ({"TF_CONFIG": "mine"}, [self._beside("time.sleep(1)")])):
            done = self.run(self.job(script, env=env, side_processes=beside))
            assert done.returncode == 0, done.stderr
            assert (self.folder / "config.0").read_text() == env.get("TF_CONFIG", ""), (
                "TF_CONFIG is written in a job that has ranks alone, or over the user's"
            )

    def test_the_end_of_a_process_beside_the_ranks_is_told_and_the_job_goes_on(self) -> None:
        beside = [self._beside("sys.exit(3)")]
        script = """
        time.sleep(1)
        here()
        """
        done = self.run(self.job(script, side_processes=beside))
        assert done.returncode == 0, done.stderr
        assert "ps 0 has ended before the ranks" in done.stderr, done.stderr
        assert "exit code 3" in done.stderr, done.stderr

    def test_the_failure_of_a_vital_process_ends_the_job(self) -> None:
        beside = [self._beside("time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)", is_vital=True)]
        done = self.run(self.job(f"time.sleep({_SLEEP_SEC})", side_processes=beside))
        assert done.returncode == 1, f"exit code {done.returncode}:\n{done.stderr}"
        assert "ps 0 has failed" in done.stderr, done.stderr
        assert "SIGKILL" in done.stderr, done.stderr

    def test_a_process_beside_the_ranks_that_does_not_end_is_killed(self) -> None:
        script = f"""
        import subprocess
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "{_SLEEP_SEC}"], start_new_session=True)
        job_values().set("ready", b"")
        time.sleep({_SLEEP_SEC})
        """
        wait = """
        from datetime import timedelta
        from unidist.control import job_values
        job_values().wait(["ready"], timedelta(seconds=60))
        """
        done = self.run(self.job(wait, side_processes=[self._beside(script)]))
        assert done.returncode == 0, done.stderr
        assert not self._wait_for_end(), "a process beside the ranks outlives the job"

    def test_no_process_beside_the_ranks_is_left_when_the_launcher_is_killed(self) -> None:
        beside = [self._beside(f"pathlib.Path('beside').touch(); time.sleep({_SLEEP_SEC})")]
        with self.start(self.job(f"here()\ntime.sleep({_SLEEP_SEC})", side_processes=beside)) as process:
            self._wait_for_ranks()
            assert self._wait_until((self.folder / "beside").exists)
            process.kill()
            process.wait()
            assert self._wait_until(lambda: not self._alive()), f"left behind: {self._alive()}"

    def test_a_process_beside_the_ranks_that_cannot_be_started_is_an_error(self) -> None:
        beside = {**self._beside(""), "command": ["/there/is/no/such/server"]}
        done = self.run(self.job(f"time.sleep({_SLEEP_SEC})", side_processes=[beside]))
        assert done.returncode != 0, "a job whose server does not exist has succeeded"
        assert "/there/is/no/such/server" in done.stderr, f"the message does not name the program:\n{done.stderr}"

    def test_a_job_that_may_lose_ranks_goes_on_without_one(self) -> None:
        self._beside("")
        script = """
        here()
        wait_for_all()
        if rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        here(name="end")
        """
        done = self.run(self.job(script, outlives_ranks=True))
        assert done.returncode == 0, f"exit code {done.returncode}:\n{done.stderr}"
        assert f"rank {self.num_proc - 1} is lost" in done.stderr, done.stderr
        assert (self.folder / "end.0").exists()

    def test_a_job_that_may_lose_ranks_ends_when_a_script_fails(self) -> None:
        self._beside("")
        script = f"""
        here()
        wait_for_all()
        if rank == size - 1:
            raise ValueError("mine")
        time.sleep({_SLEEP_SEC})
        """
        done = self.run(self.job(script, outlives_ranks=True))
        assert done.returncode == 1, f"exit code {done.returncode}:\n{done.stderr}"
        assert "ValueError: mine" in done.stderr
