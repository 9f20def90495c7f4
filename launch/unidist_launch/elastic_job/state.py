"""State that a launcher of an elastic job keeps, so that another one can take its place if it dies.

There are three parts, in one file, which only the control server's thread writes once that runs:

    identity      of the job: its command, secret, name and port. Written before anything is started.
    coordinator   which generation counts and who is in it (`ResumableCoordinator.snapshot`). Written before anybody is
                  told of it.
    launcher      which workers, slots and hosts there are (`kept_parts`). Written after what it follows from was
                  written; it may be a moment behind, and agents tell the rest when they come back.

The file is removed when the job ends in any other way than by the launcher's sudden death.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from unidist.control.elastic.resumable_coordinator import ResumableCoordinator, Snapshot
from unidist.control.messages import RELEASE
from unidist.control.server import ControlServer
from unidist.control.service import Action, Service
from unidist.errors import ConfigurationError
from unidist.launcher import Job
from unidist_launch.elastic_job.state_dir import StateDir, damaged


@dataclass(frozen=True)
class JobIdentity:
    """By what a job's processes know each other.

    Args:
        secret: the job's secret.
        job_id: random name of the job.
        port: of the control server; 0: any that is free.
    """

    secret: bytes
    job_id: str
    port: int = 0

    @classmethod
    def new(cls, secret: bytes | None = None) -> JobIdentity:
        """Return that of a new job, with a secret that its processes know already, or with a new one."""
        return cls(secret or secrets.token_bytes(32), secrets.token_hex(8))


class KeptState:
    """The state of one job in its folder.

    Args:
        job: the job; `job.elastic.state_dir` is set.
        stack: takes what has to be given back.

    Attributes:
        identity: of the job.
        found: what the launcher before this one left; None: there was none.
        failure: why nothing can be kept any more, for the user; "" while it can.

    Raises:
        ConfigurationError: the folder is another launcher's, damaged, or another job's.
    """

    def __init__(self, job: Job, stack: ExitStack) -> None:
        assert job.elastic is not None
        assert job.elastic.state_dir is not None
        self._folder = StateDir(job.elastic.state_dir)
        stack.callback(self._folder.close)
        self.failure = ""
        self._has_ended = False
        self._coordinator: ResumableCoordinator | None = None
        self._job = {
            "version": RELEASE,
            "command": list(job.command),
            "folder": os.getcwd(),
            "num_proc": job.num_proc,
            "min_np": job.elastic.min_num,
            "max_np": job.elastic.max_num,
            "orphan_timeout": job.elastic.orphan_timeout.total_seconds(),
            "heartbeat": job.heartbeat.total_seconds(),
        }
        self._state: dict[str, Any] = {}
        self.found = self._folder.read()
        self.identity = JobIdentity.new() if self.found is None else self._identity(self.found)

    def open_server(
        self, coordinator: ResumableCoordinator, service: Service, *, host: str, now: float
    ) -> ControlServer:
        """Return the job's server, with the state of the coordinator that was before, if there was one.

        Args:
            coordinator: of the job.
            service: what is served: the coordinator, maybe with something beside it.
            host: address to listen on.
            now: the time.

        Raises:
            ConfigurationError: the state is damaged, or the port that the job's processes know is not to be had.
        """
        if self.found is not None:
            try:
                coordinator.restore(self.found["coordinator"], now=now)
            except (KeyError, TypeError, ValueError, AttributeError):
                raise damaged(self._folder.path) from None
        self._coordinator = coordinator
        identity = self.identity
        try:
            server = ControlServer(
                service, identity.secret, host=host, port=identity.port, before_acting=self._keep_coordinator
            )
        except OSError as exc:
            raise ConfigurationError(
                f"port {identity.port}, at which the job's processes look for their launcher, cannot be listened on: "
                f"{exc.strerror or exc}. If another program has it, end that one and start this again soon"
            ) from exc
        self._state = {
            **(self.found or {"launcher": None}),
            "job": self._job,
            "identity": {"secret": identity.secret.hex(), "job_id": identity.job_id, "port": server.port},
            "coordinator": coordinator.snapshot(),
        }
        try:
            self._folder.write(self._state)
        except OSError as exc:
            server.close()
            raise ConfigurationError(f"--state-dir {str(self._folder.path)!r} cannot be written: {exc}") from exc
        return server

    def keep_launcher(self, kept: Snapshot) -> Iterable[Action]:
        """Keep the launcher's own part. In the server's thread."""
        self._state["launcher"] = kept
        self._write()
        return ()

    def end(self) -> None:
        """The job ends: there is nothing to take over."""
        self._has_ended = True
        self._folder.remove()

    def _keep_coordinator(self) -> None:
        assert self._coordinator is not None
        news = self._coordinator.news()
        if news is not None:
            self._state["coordinator"] = news
            self._write()

    def _write(self) -> None:
        if self._has_ended:
            return
        try:
            self._folder.write(self._state)
        except OSError as exc:
            # Training goes on; but an old state must not come to life, for its generation may have passed.
            self.end()
            self.failure = (
                f"--state-dir {str(self._folder.path)!r} cannot be written: {exc}. The job goes on; but if this "
                "launcher dies, no other can take its place"
            )

    def _identity(self, found: dict[str, Any]) -> JobIdentity:
        try:
            theirs, known = found["job"], found["identity"]
            identity = JobIdentity(bytes.fromhex(known["secret"]), str(known["job_id"]), int(known["port"]))
            differing = [name for name, value in self._job.items() if theirs[name] != value]
        except (KeyError, TypeError, ValueError):
            raise damaged(self._folder.path) from None
        if differing:
            name = differing[0]
            raise ConfigurationError(
                f"--state-dir {str(self._folder.path)!r} holds a job that its launcher has left, with {name} "
                f"{theirs[name]!r}; this one has {self._job[name]!r}. Start it again by the same command, or give "
                "another folder"
            )
        return identity


__all__ = ["JobIdentity", "KeptState"]
