"""One run of an elastic job: agents, workers and the coordinator, until the script has come to its end.

What the world is to be, the coordinator decides, in the control server's thread. This loop hears what happens and
passes it on: to the supply, which starts processes where there is room for them, and to the ends, which say how they
ended and give up when nothing gets on.
"""

from __future__ import annotations

import selectors
import signal
import time
from contextlib import ExitStack
from typing import Any

from typing_extensions import override

from unidist.control.codec import Message
from unidist.control.elastic.coordinator import Beat, JobEvent
from unidist.control.messages import (
    End,
    HostFacts,
    Listen,
    Peers,
    Refused,
    Terminating,
    WorkerEnded,
    WorkerExit,
    WorkerStarted,
)
from unidist.errors import ConfigurationError
from unidist.launcher import Job
from unidist_launch.elastic_job.discovery import HostSource
from unidist_launch.elastic_job.ends import WorkerEnds
from unidist_launch.elastic_job.orders import StarterOf
from unidist_launch.elastic_job.parts import ElasticParts
from unidist_launch.elastic_job.resume import Resumption
from unidist_launch.elastic_job.supply import Supply
from unidist_launch.observation.observation import Observation
from unidist_launch.output.lines import Stream
from unidist_launch.remote.agent_loop import AgentLoop
from unidist_launch.remote.signals import ForwardedSignals
from unidist_launch.side_processes.roster import SideReports, SideRoster, drive_to_end

_TURN_SEC = 0.05
_STACKS_SEC = 0.5
_SPREADING_SEC = 3.0
"""How long processes beside the ranks wait for more hosts than the first, among which they are spread."""
_GATHERING_SEC = 1.0
"""How long hosts of a large job wait for more of them before they connect: each newcomer changes who watches whom."""


class ElasticRun(AgentLoop):
    """Runs an elastic job. To be used once, from the main thread.

    Args:
        job: the job; `job.elastic` is set.
        stack: takes what has to be given back.
        starter_of: how the agent of a host is started, where somebody else has lent all the hosts, and takes them back
            as he likes; None: here at once, elsewhere by ssh.
        source: which hosts there are, and which have gone; None: the job's, or its script says so.
        secret: the job's; default: a new one.

    Raises:
        ConfigurationError: the job cannot be started so.
    """

    def __init__(
        self,
        job: Job,
        stack: ExitStack,
        *,
        starter_of: StarterOf | None = None,
        source: HostSource | None = None,
        secret: bytes | None = None,
    ) -> None:
        self._parts = parts = ElasticParts(job, stack, starter_of, source, secret)
        self._is_lent = starter_of is not None and source is None
        self._is_taken_back = False
        self.server, self.coordinator, self.links = parts.server, parts.coordinator, parts.links
        self.observation = Observation(job, parts.log, parts.output, self._signal_worker, stack)
        reports = SideReports(
            parts.output.message,
            self.observation.publish,
            self.observation.process_exited,
            parts.ending.fail,
            parts.values.keep_end,
        )
        self.roster = SideRoster(job, self, reports, may_grow=True)
        stack.callback(self.roster.close)
        self._placed_by: float | None = None
        self._are_hosts_new = False
        self._peers_told: dict[int, Peers] = {}
        self._connect_by: float | None = None
        self._is_concluding = False
        if job.has_side_processes:
            self.observation.attach(self.roster, parts.values.connect)
        self._supply = Supply(self._parts)
        self._ends = WorkerEnds(self._parts)
        self._resumption = Resumption(self._parts, self._ends)
        if self._resumption.has_taken_over:
            self.observation.resumed(parts.generation, parts.observed_workers())
        has_begun = self._parts.generation >= 0
        self._deadline: float | None = None if has_begun else time.monotonic() + job.start_timeout.total_seconds()
        self._signals = stack.enter_context(ForwardedSignals(self._parts.ending.on_signal))

    @property
    def fallback(self) -> Job | None:
        """The job that is to go on instead, now that this one has ended; None: there is none."""
        return None if self._parts.ending.signals else self._ends.fallback

    def run(self) -> int:
        """See the job through; returns the exit code.

        Raises:
            ConfigurationError: no host can run it; nothing is left running.
        """
        parts = self._parts
        parts.selector.register(self._signals.wakeup_fd, selectors.EVENT_READ, self._signals.drain)
        parts.selector.register(parts.server.events_fd, selectors.EVENT_READ, lambda: None)
        parts.server.start()
        if self._resumption.has_taken_over:
            parts.log.publish("resumed", generation=parts.generation, workers=[each.number for each in parts.workers])
        else:
            parts.log.publish("job", command=list(parts.job.command), num_proc=parts.job.num_proc)
        while not self._is_over():
            self._supply.discover()
            self._supply.vacate()
            self._place_side_processes()  # before the workers of the same host
            if not self._is_taken_back:
                self._supply.fill()
            self._resumption.keep()
            self._turn()
            self._watch()
            parts.output.show(running=len(parts.workers), state=self.observation.summary)
            parts.ending.advance(parts.output)
        parts.output.finish()
        code = self._conclude()
        parts.log.publish("end", exit_code=code)
        self._is_concluding = True
        drive_to_end(
            self.roster,
            turn=self._last_turn,
            finishing=self.observation.finishing,
            signals=parts.ending.signals,
        )
        return code

    # The processes beside the ranks

    def _address_of(self, host: int) -> str:
        found = self._parts.hosts.by_index(host)
        assert found is not None
        return self._parts.hosts.address_of(found)

    def _place_side_processes(self) -> None:
        """Start what waits for a host; at first when all hosts have come, or after a moment, so as to spread it."""
        if self.roster.refused:
            raise ConfigurationError("; ".join(self.roster.refused))
        if self.roster.is_empty:
            return
        parts, now = self._parts, time.monotonic()
        usable = [host for host in parts.hosts.present() if host.is_up and parts.slots.num_on(host.name)]
        if not usable:
            return
        self._placed_by = self._placed_by or now + _SPREADING_SEC
        are_all_there = all(host.is_up or host.failures for host in parts.hosts.by_name.values())
        if are_all_there or now >= self._placed_by:
            self.roster.place([host.index for host in usable])

    def _last_turn(self) -> None:
        self._place_side_processes()
        self._turn()
        self.observation.turn()
        self._parts.output.show(running=0, state=self.observation.summary)

    # The end

    def _is_over(self) -> bool:
        parts = self._parts
        if parts.ending.is_hopeless:
            return True
        if parts.workers:
            return False
        return parts.is_finishing or parts.ending.has_begun or self._is_taken_back

    def _conclude(self) -> int:
        parts, verdict = self._parts, self._ends.verdict
        if self._is_taken_back and not parts.is_finishing and not parts.ending.has_begun:
            parts.output.message("unidist: all hosts were taken back; the ranks have left")
            return 128 + signal.SIGTERM
        if self.fallback is not None:
            return 0  # of that job
        if verdict:
            parts.output.message(f"unidist: {verdict}")
        code = parts.ending.conclude(parts.output)
        return 1 if verdict and not code else code

    # What happens

    def _turn(self) -> None:
        """Wait for the next event and deal with it."""
        parts = self._parts
        next_free = parts.slots.next_free(time.monotonic())
        for key in parts.ending.wait(parts.selector, parts.output, _TURN_SEC, next_free):
            key.data()
        self._ends.next_round()
        self.take_events()
        self._connect_hosts()
        self.roster.turn()

    @override
    def _hear_coordinator(self, event: object) -> None:
        if isinstance(event, JobEvent):
            self._note(event.kind, event.fields)
        elif isinstance(event, Beat):
            self._note_commits(event)
            self.observation.beat(event.worker, vars(event.step_times))

    def _welcome(self, index: int, facts: HostFacts) -> None:
        parts = self._parts
        host = parts.hosts.by_index(index)
        if host is None:
            parts.tell(End(), index)  # nobody knows it any more
        else:
            is_back = host.is_awaited
            parts.hosts.came(host, facts, time.monotonic())
            parts.log.publish("host_joined", host=host.name, index=index, address=facts.address, cores=facts.cores)
            if is_back:
                self._resumption.welcome(host, facts)
            self._are_hosts_new = True
            if facts.terminating:
                self._terminate_host(index)

    @override
    def _hear_of_ranks(self, index: int, message: Message) -> None:
        parts = self._parts
        match message:
            case WorkerStarted(number, pid):
                worker = parts.workers.get(number)
                if worker is not None:
                    worker.pid = pid
                    parts.log.publish("process", worker=number, seat=worker.seat, pid=pid)
            case WorkerEnded(number):
                parts.server.call(lambda: parts.coordinator.process_ended(number, now=time.monotonic()))
            case WorkerExit(number, _, returncode):
                self._ends.end_worker(number, returncode)
            case Refused(text):
                host = parts.hosts.by_index(index)
                raise ConfigurationError(f"host {host.name if host else index}: {text}")
            case Terminating():
                self._terminate_host(index)
            case _:
                super()._hear_of_ranks(index, message)

    def _printed(self, seat: int, stream: Stream, data: bytes) -> None:
        if data:
            self._parts.output.feed(seat, stream, data)
            self._parts.workers.wrote(seat, stream, data)

    def _listens(self, host: int, port: int) -> None:
        self._are_hosts_new = True

    def _terminate_host(self, index: int) -> None:
        parts = self._parts
        host = parts.hosts.by_index(index)
        if host is not None and not host.is_terminating:
            host.is_terminating = True
            parts.log.publish("host_terminating", host=host.name)
            self.roster.vacate(index)
            for worker in parts.workers.of_host(index):
                parts.retire(worker.number)
            # Those without an agent are as little the job's any more: what takes them back has nobody there to tell.
            self._is_taken_back = self._is_lent and not any(each.is_up for each in parts.hosts.by_name.values())
            if self._is_concluding and self._is_taken_back:
                parts.ending.on_signal(signal.SIGTERM)  # nobody can wait for evaluations any more

    def _lose_host(self, index: int, reason: str) -> None:
        parts = self._parts
        host = parts.hosts.by_index(index)
        if host is None:
            return
        said = parts.hosts.text(host)
        text = f"host {host.name} was lost: {reason}{'; ' + said if said else ''}"
        parts.log.publish("host_lost", host=host.name, reason=reason)
        parts.links.lost(index)
        self._are_hosts_new = True
        parts.hosts.lost(host, time.monotonic())
        for worker in parts.workers.of_host(index):
            self._ends.end_worker(worker.number, 1, host_lost=text)
        self.roster.host_lost(index, reason)

    # Hosts that do not reach each other

    def _connect_hosts(self) -> None:
        """Have the agents of several hosts listen for each other, at the addresses that their ranks will use.

        Once in a turn, in which many may have come or gone.
        """
        if not self._are_hosts_new:
            return
        parts, now = self._parts, time.monotonic()
        present = parts.hosts.present()
        for host in present if len(present) > 1 else ():
            address = parts.hosts.address_of(host)
            if host.listens_at != address:
                host.listens_at = address
                parts.tell(Listen(address), host.index)
        started = [host.index for host in parts.hosts.by_name.values() if host.index >= 0]
        if parts.links.is_gathering(started):
            self._connect_by = self._connect_by or now + _GATHERING_SEC
            if now < self._connect_by:
                return
        self._are_hosts_new, self._connect_by = False, None
        listens_at = {host.index: host.listens_at for host in present}
        told: dict[int, Peers] = {}
        for index in listens_at:
            told[index] = Peers(
                tuple(
                    (peer, listens_at[peer], parts.links.port(peer))
                    for peer in parts.links.peers(index)
                    if peer in listens_at
                )
            )
            if told[index] != self._peers_told.get(index, Peers(())):
                parts.tell(told[index], index)
        self._peers_told = told

    def _leave_out(self, now: float) -> None:
        """Go on without a host if two do not reach each other, though this launcher reaches both."""
        parts = self._parts
        if not parts.links.has_broken:
            return
        order = [host.index for host in parts.hosts.present()]
        found = parts.links.leave_out(order, {index: len(parts.workers.of_host(index)) for index in order}, now)
        if found is None or parts.ending.has_begun:
            return
        names = {host.index: host.name for host in parts.hosts.present()}
        name, others = names[found.index], " and ".join(names.get(peer, "?") for peer in found.unreached)
        reason = (
            f"{name} and {others} do not reach each other, though the launcher reaches them: nothing was heard for "
            f"{found.silent_sec:.1f} seconds. A firewall, a route or a cable? The job goes on without {name} until "
            "they do"
        )
        parts.log.publish("hosts_apart", host=name, others=[names.get(peer, "?") for peer in found.unreached])
        parts.links.lost(found.index)
        parts.server.call(lambda: parts.coordinator.leave_out_host(found.index, reason))
        if parts.generation < 0:  # nobody waits for -np ranks, of which some cannot come
            parts.server.call(lambda: parts.coordinator.accept_fewer(now=time.monotonic()))

    def _note(self, kind: str, fields: dict[str, Any]) -> None:
        """The coordinator has done something."""
        parts, now = self._parts, time.monotonic()
        parts.log.publish(kind, **fields)
        worker = parts.workers.get(int(fields.get("worker", -1)))
        if kind == "generation":
            self._begin_generation(fields, now)
        elif kind == "short":
            self._deadline = now + parts.limits.timeout.total_seconds()
            self._ends.is_short(int(fields["newcomers"]))
        elif kind == "enough":
            self._deadline = None
            self._ends.is_short(0)
        elif kind == "state_lost":
            self._ends.give_up(str(fields["reason"]))
        elif kind == "joined" and worker is not None:
            worker.is_ready = True
        elif kind == "leaving" and worker is not None:
            worker.is_leaving = True
        elif kind == "left" and worker is not None:
            worker.is_leaving = worker.has_left = True
        elif kind == "hung" and worker is not None:
            # Its stacks first, if it still can show them; then it is killed.
            worker.is_hung = True
            worker.kill_at = now + _STACKS_SEC
            parts.signal_worker(worker.number, worker.host, signal.SIGUSR2)

    def _begin_generation(self, fields: dict[str, Any], now: float) -> None:
        parts = self._parts
        parts.generation = int(fields["generation"])
        parts.slots.settle(fields["workers"])
        self._deadline = None
        for number in fields["workers"]:
            worker = parts.workers.get(number)
            if worker is not None and worker.joined is None:
                worker.joined = now
        self._ends.world_began(fields["workers"], parts.patience.world_began())

    def _note_commits(self, beat: Beat) -> None:
        worker = self._parts.workers.get(beat.worker)
        if worker is not None and beat.num_commits > worker.num_commits:
            worker.num_commits = beat.num_commits
            self._parts.patience.committed()

    # What nobody reports

    def _watch(self) -> None:
        """Look after agents that do not come, deadlines, and workers that hang."""
        parts, now = self._parts, time.monotonic()
        parts.hosts.reap()
        self._ends.turn(now)
        self._leave_out(now)
        self.observation.turn()
        for host, why in parts.hosts.failed(now):
            parts.log.publish("host_failed", host=host.name, reason=why)
            parts.hosts.lost(host, now)
            none_came = all(each.is_hopeless for each in parts.hosts.by_name.values())
            if none_came and parts.generation < 0 and parts.discovery is None:
                raise ConfigurationError(f"host {host.name}: {why}")
        for worker in parts.workers:
            if worker.kill_at is not None and now >= worker.kill_at:
                worker.kill_at = None
                parts.signal_worker(worker.number, worker.host, signal.SIGKILL)
        if not parts.workers and self._deadline is None:  # nobody waits who could be short of others
            self._deadline = now + parts.limits.timeout.total_seconds()
        if self._deadline is not None and now >= self._deadline and not parts.ending.has_begun:
            self._deadline = None
            self._out_of_time()

    def _signal_worker(self, number: int, signal_number: int) -> None:
        worker = self._parts.workers.get(number)
        if worker is not None:
            self._parts.signal_worker(number, worker.host, signal_number)

    def _out_of_time(self) -> None:
        parts, seconds = self._parts, self._parts.limits.timeout.total_seconds()
        if parts.generation < 0 and not parts.coordinator.membership.accepts_fewer:
            # Horovod's order: -np is what one wishes, --min-np what one needs.
            self._deadline = time.monotonic() + seconds
            parts.server.call(lambda: parts.coordinator.accept_fewer(now=time.monotonic()))
            return
        self._ends.fall_short(
            f"there were too few processes for {seconds:g} seconds (--elastic-timeout): {parts.limits.needs}"
        )


__all__ = ["ElasticRun"]
