"""Ends the processes that this one has started when it closes or dies, by a separate watchdog process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from unidist.jobs import sweep as process_sweep

_CLOSE_WAIT_SEC = 15.0


class ProcessWatchdog:
    """Kills, at the latest when this process ends, whatever carries a job's id or is in a session given to `watch`.

    Args:
        job_id: what the processes have in their environment as `process_sweep.JOB_ID_VARIABLE`.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._leaders: dict[int, int] = {}
        self._closed = False
        command = [sys.executable, "-I", "-S", process_sweep.__file__, str(os.getpid()), job_id]
        # Without an outer job's id: when that job is swept, the program must live on to end its own processes.
        env = {name: value for name, value in os.environ.items() if name != process_sweep.JOB_ID_VARIABLE}
        self._program = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env=env,
            start_new_session=True,
        )

    def watch(self, process: subprocess.Popen[bytes]) -> None:
        """Take everything in the session of `process`, which it leads, as the job's, whatever its environment."""
        with contextlib.suppress(ProcessLookupError):
            self._leaders[process.pid] = process_sweep.start_time(process.pid)
            assert self._program.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it was killed; `close` then sweeps by itself
                self._program.stdin.write(f"{process.pid} {self._leaders[process.pid]}\n".encode())

    def forget(self, process: subprocess.Popen[bytes]) -> None:
        """Leave the session of an ended process out of this process's own sweeps."""
        self._leaders.pop(process.pid, None)

    def kill(self) -> bool:
        """Kill the present processes and keep watching; return False if some still run after ten seconds."""
        return process_sweep.kill_processes(self._job_id, self._leaders)

    def close(self) -> None:
        """Kill what is left. Idempotent.

        Raises:
            RuntimeError: a process could not be killed within seconds (it hangs in the kernel); names it.
        """
        if self._closed:
            return
        self._closed = True
        assert self._program.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._program.stdin.close()
        try:
            swept = self._program.wait(_CLOSE_WAIT_SEC) == 0
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()
            swept = False
        if not swept and not self.kill():
            left = process_sweep.find_processes(self._job_id, self._leaders)
            raise RuntimeError(f"processes {left} of this job do not die from SIGKILL; they hang in the kernel")
