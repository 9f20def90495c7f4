"""A running job of a campaign: its output, its processes, and what is done to them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import psutil

from benchmarks.faults.plans import Fault

__all__ = ["CampaignJob"]

_SCRIPT = Path(__file__).with_name("training.py")
_MARK = "UNIDIST_FAULTS_RUN"
_HEARTBEAT_SEC = 2.0
_WAIT_SEC = 0.02
_OPTIONS = {
    "plain": ("-np", "3"),
    "elastic": ("-np", "3", "--min-np", "1"),
    "durable": ("-np", "3", "--min-np", "1", "--checkpoint-dir", "kept", "--checkpoint-interval", "0.5"),
    "spare": ("-np", "2", "--min-np", "1", "--spares", "1"),
    "resumable": ("-np", "3", "--min-np", "1", "--state-dir", "state"),
    "servers": ("-np", "2", "--strategy", "parameter_server=async:scale=none:shard_size=64B:servers=2:replicas=1"),
    "data": ("-np", "2", "--data-workers", "2"),
}
_KINDS_OF_SCRIPT = {"plain": "plain", "servers": "servers", "data": "data"}
_COMMANDS = {
    "agent": "unidist_launch.agent",
    "server": "unidist_parameter_server.server",
    "data worker": "unidist_data_service.worker",
}


class CampaignJob:
    """A job in its own folder. A context manager, which ends it.

    Args:
        kind: of `plans.JOBS`.
        engine: of its ranks.
        folder: empty, and stays so apart from what the job writes there.
    """

    def __init__(self, kind: str, engine: str, folder: Path) -> None:
        self._kind = kind
        self._folder = folder
        self._mark = f"{time.time_ns()}"
        (folder / "tmp").mkdir()
        own = {_MARK: self._mark, "TMPDIR": str(folder / "tmp"), "UNIDIST_ENGINE": engine}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")  # PyTorch leaves it behind
        own |= {"UNIDIST_HEARTBEAT_SEC": f"{_HEARTBEAT_SEC:g}", "OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "60"}
        self._environment = os.environ | own
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.lines: list[str] = []
        self.restarts = 0
        self._start()

    def _start(self) -> None:
        launch = [sys.executable, "-m", "unidist_launch", "launch", *_OPTIONS[self._kind]]
        script = [sys.executable, str(_SCRIPT), _KINDS_OF_SCRIPT.get(self._kind, "elastic")]
        self.launcher = subprocess.Popen(
            [*launch, *script],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        for stream in (self.launcher.stdout, self.launcher.stderr):
            thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._lock:
                    self.lines.append(line.rstrip("\n"))

    def __enter__(self) -> CampaignJob:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.launcher.wait(30)
        for thread in self._threads:
            thread.join(10)

    # What there is

    @property
    def step(self) -> int:
        """The last step that a rank has told of."""
        return max((int(number) for number in self._said(r"step (\d+) .*")), default=0)

    def totals(self) -> set[str]:
        """Return what the ranks computed."""
        return set(self._said(r"total (.*)"))

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the job, including those started by other processes of it."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def files(self) -> list[str]:
        """Return what the job has left in its folder for temporary files."""
        return sorted(os.listdir(self._folder / "tmp"))

    def _said(self, pattern: str) -> list[str]:
        with self._lock:
            lines = list(self.lines)
        return [match[1] for line in lines if (match := re.fullmatch(r"\[[\d,-]+\] " + pattern, line))]

    def _named(self, target: str) -> list[psutil.Process]:
        if target == "launcher":
            return [psutil.Process(self.launcher.pid)] if self.launcher.poll() is None else []
        here = self.processes()
        if target == "job":
            return here
        if target in _COMMANDS:
            return [each for each in here if any(_COMMANDS[target] in word for word in _words(each))]
        own = [each for each in here if str(_SCRIPT) in _words(each)[:2] and each.pid != self.launcher.pid]
        entered = {int(pid) for pid in self._said(r"(?:enter|step \d+) \d+ (\d+)")}
        if target == "rank 0":
            first = self._said(r"(?:enter|step \d+) 0 (\d+)")[-1:]
            return [each for each in own if str(each.pid) in first]
        if target == "spare":
            return [each for each in own if each.pid not in entered]
        return [each for each in own if each.pid in entered] or own

    # What happens to it

    def meet(self, fault: Fault, deadline: float) -> bool:
        """Have a fault happen when its time has come; returns False if the job had ended before."""
        first = self.step
        while fault.step and self.step < first + fault.step:
            if self._is_over(deadline):
                return False
            time.sleep(_WAIT_SEC)
        if fault.target == "folder":
            self._harm_folder(fault.kind)
            return True
        while not (found := sorted(self._named(fault.target), key=lambda each: each.pid)):
            if self._is_over(deadline):
                return False
            time.sleep(_WAIT_SEC)
        chosen = found if fault.target in ("every rank", "job") else [found[fault.chosen % len(found)]]
        self._harm(fault, chosen)
        return True

    def _is_over(self, deadline: float) -> bool:
        return self.launcher.poll() is not None or time.monotonic() > deadline

    def _harm(self, fault: Fault, chosen: list[psutil.Process]) -> None:
        kind = fault.kind
        if kind in ("raise", "hold lock", "no memory"):
            (self._folder / f"{kind}-{chosen[0].pid}").touch()
        elif kind in ("pause", "freeze"):
            _signal(chosen, signal.SIGSTOP)
            time.sleep(fault.seconds)
            _signal(chosen, signal.SIGCONT)
        elif kind == "slow":
            rng, until = random.Random(fault.chosen), time.monotonic() + fault.seconds
            while time.monotonic() < until:
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    _signal(chosen, number)
                    time.sleep(rng.uniform(0.01, 0.3))
        else:
            _signal(chosen, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind])
        if fault.target == "launcher" and kind == "kill" and self._kind == "resumable":
            self.launcher.wait()
            self.restarts += 1
            self._start()

    def _harm_folder(self, kind: str) -> None:
        kept = self._folder / "kept"
        if kind == "remove":
            shutil.rmtree(kept, ignore_errors=True)
        else:  # where the next checkpoint wants its folder, there is a file
            kept.mkdir(exist_ok=True)
            for number in range(1, 200):
                with contextlib.suppress(OSError):
                    (kept / f"step-{number}.writing").touch(exist_ok=False)

    def end(self, deadline: float) -> int | None:
        """Wait for the end of the job, and return its exit code; None: it did not end."""
        try:
            code = self.launcher.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None
        for thread in self._threads:
            thread.join(10)
        return code


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
