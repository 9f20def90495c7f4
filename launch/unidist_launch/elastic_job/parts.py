"""The parts of an elastic job in its launcher: made once, and shared by the classes that work with some of them."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterable
from contextlib import ExitStack

from unidist.control.codec import Message
from unidist.control.coordinator import SILENCE_PER_HEARTBEAT
from unidist.control.elastic.coordinator import ElasticCoordinator
from unidist.control.elastic.host_links import HostLinks
from unidist.control.elastic.membership import Membership, Phase
from unidist.control.elastic.replicas import ReplicaShape
from unidist.control.elastic.resumable_coordinator import ResumableCoordinator
from unidist.control.messages import End, Signal, SignalWorkers
from unidist.control.server import ControlServer
from unidist.control.service import Action, Service
from unidist.errors import ConfigurationError
from unidist.launcher import DurableOptions, ElasticLimits, Host, Job, ObservedWorker
from unidist_launch.elastic_job.discovery import Discovery, HostSource
from unidist_launch.elastic_job.hosts import ElasticHosts
from unidist_launch.elastic_job.orders import Orders, StarterOf, by_ssh
from unidist_launch.elastic_job.patience import Patience
from unidist_launch.elastic_job.report import tell
from unidist_launch.elastic_job.slots import Slots
from unidist_launch.elastic_job.state import JobIdentity, KeptState
from unidist_launch.elastic_job.workers import StartedWorkers
from unidist_launch.observation.event_log import EventLog
from unidist_launch.options import hosts as host_list
from unidist_launch.output.writer import Output
from unidist_launch.remote.ending import Ending
from unidist_launch.side_processes.values import LauncherValues

_LOOPBACK = "127.0.0.1"
_GOODBYES_SEC = 3.0


def _try_folder(durable: DurableOptions) -> None:
    try:
        durable.try_folder()
    except OSError as exc:
        raise ConfigurationError(
            f"--checkpoint-dir {str(durable.folder)!r} cannot have this job's checkpoints: {exc.strerror}. Choose a "
            "folder that can be written"
        ) from exc


class ElasticParts:
    """The parts of one job.

    Args:
        job: the job; `job.elastic` is set.
        stack: takes what has to be given back.
        starter_of: how the agent of a host is started; None: here at once, elsewhere by ssh.
        source: which hosts there are; None: the job's, or its script says so.
        secret: the job's; None: a new one.

    Attributes:
        generation: of the last world that has begun; -1 before the first.
        is_finishing: the script has come to its end on a rank; nothing is started any more.
        host_names: by seat, for the report.

    Raises:
        ConfigurationError: the job cannot be started so.
    """

    def __init__(
        self,
        job: Job,
        stack: ExitStack,
        starter_of: StarterOf | None = None,
        source: HostSource | None = None,
        secret: bytes | None = None,
    ) -> None:
        assert job.elastic is not None
        self.job = job
        self.limits: ElasticLimits = job.elastic
        hosts = job.hosts or (Host("localhost", self.limits.slots_per_host or job.num_proc),)
        is_here = all(map(host_list.is_local, hosts)) and self.limits.discovery_script is None
        is_here = is_here and starter_of is None and source is None
        self.is_here = is_here
        """No other host can ever be among the job's."""
        if is_here and self.limits.durable is not None:
            _try_folder(self.limits.durable)  # elsewhere only the ranks can tell
        self.kept = None if self.limits.state_dir is None else KeptState(job, stack)
        self.generation = -1
        self.is_finishing = False
        self.host_names: dict[int, str] = {}
        self.log = EventLog(self.limits.event_log)
        stack.callback(self.log.close)
        self.slots = Slots(self.limits.cooldown, num_spare=self.limits.num_spares)
        if source is None and self.limits.discovery_script is not None:
            source = Discovery(self.limits.discovery_script, self.limits.slots_per_host)
        self.discovery = source
        if source is None:
            self.slots.offer(hosts)
        else:
            stack.callback(source.close)
        self.workers = StartedWorkers()
        self.links = HostLinks(job.heartbeat.total_seconds())
        self.patience = Patience(job.num_proc, self.limits.reset_limit)
        self.ending = Ending(
            job.grace_period,
            signal_ranks=self.signal_all,
            host_of=lambda seat: self.host_names.get(seat, "?"),
        )
        self.output = stack.enter_context(
            Output.of_job(
                job,
                give_up=lambda: self.ending.is_overdue,
                num_ranks=max(self.limits.max_num, job.num_proc),
                append=self.kept is not None and self.kept.found is not None,
            )
        )
        self.log.listen(lambda event, fields: tell(self.output, event, fields))
        membership = Membership(
            num_first=job.num_proc,
            min_num=self.limits.min_num,
            max_num=self.limits.max_num,
            shape=None if self.limits.mesh is None else ReplicaShape.of(self.limits.mesh),
        )
        self.values = LauncherValues()
        """That the job's processes share."""
        self.coordinator, self.server, identity = self._open_server(membership, secret)
        self.values.served_by(self.server, identity.secret)
        self.selector = stack.enter_context(selectors.DefaultSelector())
        orders = Orders(job, identity, self.server.port, starter_of or by_ssh(job, is_here=is_here))
        self.num_agents = 0
        """How many agents there have been; the index of the next one."""
        silence_sec = SILENCE_PER_HEARTBEAT * job.heartbeat.total_seconds()
        self.hosts = ElasticHosts(orders.starter_of, orders.order_for, self.selector, self._next_agent, silence_sec)
        stack.callback(self._end_state)  # after the server's thread, which may be writing it
        stack.callback(self.server.close)
        stack.callback(self._await_goodbyes)
        stack.callback(self.hosts.end)
        stack.callback(self.tell, End(), None)
        stack.callback(self.server.call, self._end_state)

    def _open_server(
        self, membership: Membership, secret: bytes | None
    ) -> tuple[ElasticCoordinator, ControlServer, JobIdentity]:
        silence = SILENCE_PER_HEARTBEAT * self.job.heartbeat
        host = _LOOPBACK if self.is_here else ""
        if self.kept is not None:
            # Those who look for a launcher notice a little later that it is gone than it dies.
            patience = self.limits.orphan_timeout + self.job.heartbeat
            resumable = ResumableCoordinator(
                membership,
                heartbeat=self.job.heartbeat,
                silence=silence,
                stall=self.limits.stall,
                patience=patience,
            )
            server = self.kept.open_server(resumable, self._served(resumable), host=host, now=time.monotonic())
            return resumable, server, self.kept.identity
        coordinator = ElasticCoordinator(
            membership, heartbeat=self.job.heartbeat, silence=silence, stall=self.limits.stall
        )
        identity = JobIdentity.new(secret)
        return coordinator, ControlServer(self._served(coordinator), identity.secret, host=host), identity

    def _served(self, coordinator: ElasticCoordinator) -> Service:
        """Return what the control server serves: the coordinator and, if processes need them, values."""
        return self.values.beside(coordinator) if self.job.has_side_processes else coordinator

    def _end_state(self) -> Iterable[Action]:
        if self.kept is not None:
            self.kept.end()
        return ()

    def _await_goodbyes(self) -> None:
        """Wait until the agents that another launcher had started have ended what they have."""
        deadline = time.monotonic() + _GOODBYES_SEC
        while self.hosts.has_taken_over and self.coordinator.num_agents and time.monotonic() < deadline:
            time.sleep(0.01)

    def tell(self, message: Message, index: int | None) -> None:
        """Send a message to the agent of this index; None: to all."""
        hosts = None if index is None else [index]
        self.server.call(lambda: self.coordinator.tell(message, hosts))

    def signal_all(self, number: int) -> None:
        """Send a signal to all workers. Also from a signal handler."""
        self.tell(Signal(number), None)

    def signal_worker(self, worker: int, host: int, number: int) -> None:
        """Send a signal to one worker."""
        self.tell(SignalWorkers(number, (worker,)), host)

    def label(self, seat: int, host: str) -> None:
        """Take the output of a worker of this host under the label of a seat.

        There may be more seats than ranks: workers that are to leave have theirs while others take their place.
        """
        self.host_names[seat] = host
        self.output.make_room(seat + 1)

    def observed_workers(self) -> list[ObservedWorker]:
        """Return all workers as observers are told of them. Before the control server starts."""
        members = self.coordinator.membership.workers
        found = []
        for worker in self.workers:
            member = members.get(worker.number)
            rank = member.rank if member is not None and member.phase is Phase.MEMBER else None
            name = self.host_names.get(worker.seat, "?")
            found.append(ObservedWorker(worker.number, worker.host, name, worker.seat, worker.pid, rank))
        return found

    def retire(self, number: int) -> None:
        """Have a worker leave at the next commit of the world."""
        worker = self.workers.get(number)
        if worker is not None and not worker.is_leaving:
            worker.is_leaving = True
            self.server.call(lambda: self.coordinator.retire(number, now=time.monotonic()))

    def _next_agent(self) -> int:
        """Have the coordinator await one more agent, and return its index."""
        index, self.num_agents = self.num_agents, self.num_agents + 1
        self.server.call(lambda: self.coordinator.expect_hosts(index + 1))
        return index


__all__ = ["ElasticParts"]
