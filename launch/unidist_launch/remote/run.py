"""One run of a job over agents: the same output, report, signals and exit codes as on one host."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from typing_extensions import override

from unidist.control.codec import Message
from unidist.control.coordinator import Coordinator
from unidist.control.elastic import HostLinks
from unidist.control.messages import (
    Done,
    End,
    Exits,
    HostFacts,
    Listen,
    Peers,
    Refused,
    Signal,
    Start,
    Started,
    Terminating,
)
from unidist.control.server import ControlServer
from unidist.control.service import Service
from unidist.errors import ConfigurationError
from unidist.jobs import tf_config
from unidist.jobs.network import is_loopback
from unidist.jobs.processes import describe_exit
from unidist.launcher import Host, Job, SideProcess
from unidist.topology import Topology
from unidist_launch.observation.fixed_job import FixedJobEvents
from unidist_launch.options import hosts as host_list
from unidist_launch.output.lines import Stream
from unidist_launch.output.writer import Output
from unidist_launch.remote.agent_loop import AgentLoop
from unidist_launch.remote.ending import Ending
from unidist_launch.remote.failure import RankExit
from unidist_launch.remote.fixed_ranks import FixedRanks
from unidist_launch.remote.hosts import AgentProcess, AgentStarter, agent_error, end_all, order_of
from unidist_launch.remote.signals import ForwardedSignals
from unidist_launch.side_processes.roster import SideReports, SideRoster
from unidist_launch.side_processes.values import LauncherValues

_TURN_SEC = 0.05
_MORE_REASONS_SEC = 1.0
_MAX_GUESTS = 1024


class RemoteRun(AgentLoop, FixedRanks):
    """Runs a job by agents. To be used once, from the main thread.

    Args:
        job: the job.
        hosts: the hosts that get ranks, with their numbers.
        starters: of each host, how its agent is started; one for several hosts may start them by one command.
        stack: takes what has to be given back.
        secret: the job's; default: a new one.
        port: of the control server; default: one that is free.
        places: of each agent's ranks, where an agent has not all of a host's; then `hosts` has an item per agent.
        guests: roles whose processes run on hosts without ranks, whose agents come by themselves when they like, with
            the number of hosts of each role; 0: it is not known. Their indices are those behind `first_guest`.
        first_guest: index of the first guest; default: the number of hosts.
    """

    def __init__(
        self,
        job: Job,
        hosts: Sequence[Host],
        starters: Sequence[AgentStarter],
        stack: ExitStack,
        *,
        secret: bytes | None = None,
        port: int = 0,
        places: Sequence[tuple[Topology, ...]] | None = None,
        guests: Mapping[str, int] | None = None,
        first_guest: int = 0,
    ) -> None:
        self.job = job
        self._guest_roles = dict(guests or {})
        self._guests: dict[int, HostFacts] = {}
        self._has_values = job.has_side_processes or bool(guests)
        self._places = host_list.places(hosts) if places is None else places
        self._agents: list[AgentProcess] = []
        for index, (host, starter) in enumerate(zip(hosts, starters, strict=True)):
            leader = next((each for each in self._agents if each.starter is starter and starter.index_variable), None)
            self._agents.append(AgentProcess(index, host, starter, leader))
        self._host_of = {place.rank: i for i, places in enumerate(self._places) for place in places}
        self._facts: dict[int, HostFacts] = {}
        self._pids: dict[int, int] = {}
        self._done: set[int] = set()
        self._lost: set[int] = set()
        self._refused: list[str] = []
        self.links = HostLinks(job.heartbeat.total_seconds())
        self._addresses: list[str] = []
        self._listening: dict[int, tuple[str, int]] = {}
        # One agent for each host. What starts agents by a command for all of them (mpirun, srun) may carry the ranks'
        # data over a network that agents know nothing of: there it is no business of theirs who reaches whom.
        first = {places[0].node_rank: index for index, places in reversed(list(enumerate(self._places)))}
        self._first_agents = [first[node_rank] for node_rank in sorted(first)]
        self._watched = [] if any(each.starter.index_variable for each in self._agents) else sorted(first.values())
        self._round = 0
        self._is_running = False
        self._cluster: tf_config.TfCluster | None = None
        self._commands_ended_at: float | None = None
        self.ending = Ending(
            job.grace_period,
            signal_ranks=lambda number: self.tell(Signal(number)),
            host_of=lambda rank: self._name(self._host_of[rank]),
            outlives_ranks=job.outlives_ranks,
        )
        self.output = stack.enter_context(Output.of_job(job, give_up=lambda: self.ending.is_overdue))
        self.events = FixedJobEvents(job, self.output, self._signal_rank, stack)
        self._secret = secret or secrets.token_bytes(32)
        num_agents = max(first_guest, len(hosts)) + _MAX_GUESTS if guests else len(hosts)
        self.coordinator = Coordinator(
            num_hosts=num_agents, world_size=job.num_proc, heartbeat=job.heartbeat, agents=self._host_of
        )
        observation = self.observation = self.events.observation
        values = LauncherValues()
        reports = SideReports(
            self.output.message,
            observation.publish,
            observation.process_exited,
            self.ending.fail,
            values.keep_end,
        )
        self.roster = SideRoster(job, self, reports, reserved=self._guest_roles)
        self.roster.check_hosts(len(self._first_agents))
        stack.callback(self.roster.close)
        service: Service = self.coordinator
        if self._has_values:
            service = values.beside(service)
            observation.attach(self.roster, values.connect)
        self.server = ControlServer(service, self._secret, port=port)
        values.served_by(self.server, self._secret)
        stack.callback(self.server.close)
        stack.callback(self._end_agents)
        stack.callback(self.tell, End())
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._signals = stack.enter_context(ForwardedSignals(self.ending.on_signal))

    def run(self) -> int:
        """Start the agents, then the ranks, and see them through; returns the exit code.

        Raises:
            ConfigurationError: a host did not come, or cannot run the command; nothing is left running.
        """
        self._selector.register(self._signals.wakeup_fd, selectors.EVENT_READ, self._signals.drain)
        self._selector.register(self.server.events_fd, selectors.EVENT_READ, lambda: None)
        self._start_agents()
        self.server.start()  # after the agents were forked: no other thread may run then
        self._await_agents()
        if not self.ending.has_begun:
            self._start_ranks()
        while self._is_running and len(self._done) < len(self._agents) and not self.ending.is_hopeless:
            self.turn()
            self._watch_commands()
            self._watch_links()
            self.show()
            if refused := [*self._refused, *self.roster.refused]:
                raise ConfigurationError("; ".join(refused))
        return self.conclude()

    # The processes beside the ranks

    @override
    def start_side(self, host: int, number: int, process: SideProcess) -> None:
        if self._cluster is not None:
            process = replace(process, env={**self._cluster.of(process), **process.env})
        super().start_side(host, number, process)

    def _address_of(self, host: int) -> str:
        guest = self._guests.get(host)
        return self._addresses[host] if guest is None else guest.address

    def _welcome_guest(self, host: int, facts: HostFacts) -> None:
        if facts.role in self._guest_roles:
            self._guests[host] = facts
            process = SideProcess(self.job.command, facts.role, facts.role_index)
            self.roster.welcome(host, process, self._guest_roles[facts.role])

    @property
    def _writes_tf_config(self) -> bool:
        return self.job.has_side_processes and not tf_config.is_given({**os.environ, **self.job.env})

    def _tf_cluster(self) -> tf_config.TfCluster | None:
        """Return what TF_CONFIG says of the job, with ports that agents have told; None if it is not written."""
        if not self._writes_tf_config:
            return None
        ports = {index: list(facts.ports) for index, facts in self._facts.items()}

        def address(index: int) -> str:
            host = self._addresses[index]
            return f"[{host}]:{ports[index].pop()}" if ":" in host else f"{host}:{ports[index].pop()}"

        workers = [address(self._host_of[rank]) for rank in range(self.job.num_proc)]
        hosts = [self.roster.host_of(each) for each in tf_config.servers_of(self.job.side_processes)]
        return tf_config.TfCluster(tuple(workers), tuple(address(index) for index in hosts if index is not None))

    # The agents and the ranks

    def _start_agents(self) -> None:
        job_id = secrets.token_hex(8)
        most = max(len(places) for places in self._places)
        num_ports = most + len(self.job.side_processes) if self._writes_tf_config else 0
        for agent in self._agents:
            order = order_of(
                self.job,
                agent.starter,
                index=agent.index,
                job_id=job_id,
                secret=self._secret,
                port=self.server.port,
                env=self.job.env,
            )
            try:
                agent.start(replace(order, num_ports=num_ports))
            except OSError as exc:
                command = agent.starter.command(agent.host)[0]
                raise ConfigurationError(f"host {agent.host.name}: cannot start {command!r}: {exc}") from exc
            agent.watch(self._selector, partial(self._show, agent))
            if self.job.verbose and agent.leader is None and agent.process is not None:
                self.output.message(f"unidist: host {agent.host.name}: started its agent")

    def _await_agents(self) -> None:
        deadline = time.monotonic() + self.job.start_timeout.total_seconds()
        while len(self._facts) < len(self._agents) and not self.ending.has_begun:
            self.turn()
            self.output.show(running=0)
            failed = [agent for agent in self._missing() if _has_failed(agent)]
            now = time.monotonic()
            if failed:
                # Where one host fails, others may too: all are told at once.
                deadline = min(deadline, now + _MORE_REASONS_SEC)
            if now >= deadline or len(failed) == len(self._missing()) > 0:
                raise ConfigurationError(self._why_missing())

    def _start_ranks(self) -> None:
        self._check_places()
        addresses = self._addresses = [self._facts[i].address for i in range(len(self._agents))]
        if len(addresses) > 1:
            # An agent of this very host reached the launcher over loopback; the others know it by what they reached.
            outside = [facts.launcher for facts in self._facts.values() if not is_loopback(facts.launcher)]
            addresses = self._addresses = [outside[0] if is_loopback(item) and outside else item for item in addresses]
        self.roster.assign(self._first_agents)
        cluster = self._cluster = self._tf_cluster()
        self.roster.place(self._first_agents)  # before the ranks
        for i, places in enumerate(self._places):
            message = Start(
                places=places,
                address=addresses[i],
                master=addresses[0],
                master_port=self._facts[0].port,
                generation=self.coordinator.generation,
                values=self._has_values,
                of_each=() if cluster is None else tuple(cluster.of_rank(place.rank) for place in places),
            )
            self.tell(message, i)
        for i in self._watched if len(self._watched) > 1 else ():
            self.tell(Listen(addresses[i]), i)
        self._is_running = True

    def _check_places(self) -> None:
        """Make sure that agents which should share a host do: what started them may have placed them otherwise.

        Raises:
            ConfigurationError: they do not.
        """
        names: dict[int, str] = {}
        for index, places in enumerate(self._places):
            name = self._facts[index].name
            first = names.setdefault(places[0].node_rank, name)
            if name != first:
                raise ConfigurationError(
                    f"rank {places[0].rank} should be on host {self._name(index)}, as others that are on {first}, but "
                    f"it is on {name}: what starts the processes places them otherwise; name hosts in its order (-H)."
                )

    @override
    def turn(self) -> None:
        for key in self.ending.wait(self._selector, self.output, _TURN_SEC):
            key.data()
        self._round += 1
        self.take_events()
        self.roster.turn()

    def _welcome(self, host: int, facts: HostFacts) -> None:
        if host >= len(self._agents):
            self._welcome_guest(host, facts)
            return
        self._facts[host] = facts
        name = self._name(host)
        self.events.host_joined(host, name, address=facts.address, cores=facts.cores)
        if self.job.verbose:
            self.output.message(f"unidist: host {name} ({facts.name}) is {facts.address}, {facts.cores} cores")

    @override
    def _hear_of_ranks(self, host: int, message: Message) -> None:
        if host in self._guests:
            return  # it has no ranks, and its own end is not the job's
        match message:
            case Exits(exits):
                for rank, pid, returncode in exits:
                    tail = self.output.stderr_tail(rank)
                    self.note_exit(RankExit(rank, pid, returncode, self._round, tail, signalled=self.ending.has_begun))
            case Started(pids):
                self._note_start(host, pids)
            case Done():
                self._done.add(host)
            case Terminating():
                self.ending.on_signal(signal.SIGTERM)
            case Refused(text):
                self._refused.append(f"host {self._name(host)}: {text}")
            case _:
                super()._hear_of_ranks(host, message)

    def _printed(self, rank: int, stream: Stream, data: bytes) -> None:
        self.output.feed(rank, stream, data)

    def _listens(self, host: int, port: int) -> None:
        self._listening[host] = (self._addresses[host], port)
        if len(self._listening) == len(self._watched):
            self._connect_hosts()

    def _note_start(self, host: int, told: Sequence[int]) -> None:
        pids = dict(zip((place.rank for place in self._places[host]), told, strict=True))
        self._pids.update(pids)
        self.events.started(host, pids)
        if len(self._pids) == self.job.num_proc:
            self.events.complete(self.job.num_proc)
        if self.job.verbose:
            for rank, pid in pids.items():
                self.output.message(f"unidist: rank {rank} is process {pid} on {self._name(host)}")

    def _connect_hosts(self) -> None:
        """Have the agents of all hosts keep links to each other."""
        for index in self._watched:
            self.tell(Peers(tuple((peer, *self._listening[peer]) for peer in self.links.peers(index))), index)

    def _watch_links(self) -> None:
        """End the job if two hosts do not reach each other: their ranks would wait until the timeout of a call."""
        if not self.links.has_broken:
            return
        found = self.links.leave_out(self._watched, {}, time.monotonic())
        if found is not None:
            others = " and ".join(self._name(peer) for peer in found.unreached)
            self.ending.fail(
                f"hosts {self._name(found.index)} and {others} do not reach each other, though the launcher reaches "
                f"them: nothing was heard for {found.silent_sec:.1f} seconds. A firewall, a route or a cable?"
            )

    def _watch_commands(self) -> None:
        """Take agents for lost whose common command has ended: what it did for their ranks (MPI) is gone as well."""
        now = time.monotonic()
        for agent in self._agents:
            if not agent.starter.index_variable or agent.index in self._done:
                continue
            assert agent.process is not None
            if agent.process.poll() is None:
                continue
            self._commands_ended_at = self._commands_ended_at or now
            if now - self._commands_ended_at > _MORE_REASONS_SEC:  # what the agents themselves sent has come by then
                self._lose_host(agent.index, f"{describe_exit(agent.process.returncode)} of what had started its agent")

    def _lose_host(self, host: int, reason: str) -> None:
        if host >= len(self._agents):
            self._guests.pop(host, None)
            self.roster.host_lost(host, reason)
            return
        name = self._agents[host].host.name
        said = self._agents[host].text.decode(errors="replace").strip()
        if not self._is_running:
            raise ConfigurationError(f"host {name} was lost before its ranks started: {reason} {said}")
        self._done.add(host)
        self._lost.add(host)
        self.links.lost(host)
        self.events.host_lost(name, reason)
        text = f"host {name} was lost: {reason}{'; ' + said.splitlines()[-1] if said else ''}"
        ended = {end.rank for end in self.ending.exits}
        for place in self._places[host]:
            if place.rank not in ended:
                self.note_exit(
                    RankExit(
                        place.rank,
                        self._pids.get(place.rank, 0),
                        1,
                        self._round,
                        signalled=self.ending.has_begun,
                        host_lost=text,
                    )
                )
        self.roster.host_lost(host, reason)

    def _show(self, agent: AgentProcess, data: bytes) -> None:
        """Show what ssh or the agent itself wrote."""
        for line in data.decode(errors="replace").splitlines() if self.job.verbose else ():
            self.output.message(f"unidist: host {agent.host.name}: {line}")

    def _end_agents(self) -> None:
        here = self._facts.keys() - self._lost
        end_all(self._agents, patient_with=[agent for agent in self._agents if agent.index in here])

    def _missing(self) -> list[AgentProcess]:
        return [agent for agent in self._agents if agent.index not in self._facts]

    def _why_missing(self) -> str:
        reasons = []
        failed = [agent for agent in self._missing() if _has_failed(agent)]
        for first in {agent.leader or agent: agent for agent in failed}:
            while first.read():
                pass
            its = dict.fromkeys(agent.host.name for agent in failed if agent is first or agent.leader is first)
            reasons.append(f"host {', '.join(its)}: {first.why()}")
        if not reasons:
            names = ", ".join(dict.fromkeys(agent.host.name for agent in self._missing()))
            seconds = self.job.start_timeout.total_seconds()
            reasons.append(f"no answer from {names} in {seconds:g} seconds (--start-timeout)")
        return "not all hosts can take part.\n  " + "\n  ".join(reasons)

    def _name(self, host: int) -> str:
        return self._agents[host].host.name

    def _signal_rank(self, rank: int, number: int) -> None:
        self.tell(Signal(number, (rank,)), self._host_of[rank])


def _has_failed(agent: AgentProcess) -> bool:
    """Return whether an agent that has not come never will; a command for several may go on for the others' sake."""
    if agent.process is None:
        return False
    shared = bool(agent.starter.index_variable)
    return agent.process.poll() is not None or (shared and bool(agent_error(agent.text.decode(errors="replace"))))
