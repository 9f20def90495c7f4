"""One run of a job over agents: the same output, report, signals and exit codes as on one host."""

from __future__ import annotations

import base64
import os
import secrets
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, replace
from datetime import timedelta
from functools import partial

from unidist._version import __version__
from unidist.control.coordinator import Coordinator, HostJoined, HostLost, HostMessage
from unidist.control.elastic import HostLinks
from unidist.control.key_values import KeyValues, KeyValueService, WithKeyValues
from unidist.control.server import ControlServer
from unidist.control.service import Service
from unidist.control.wire import Message
from unidist.errors import ConfigurationError
from unidist.jobs import tf_config
from unidist.jobs.network import interface_address, is_loopback
from unidist.jobs.processes import describe_exit
from unidist.launcher import Host, Job, SideProcess
from unidist.topology import Topology
from unidist_launch.agent.order import AgentOrder, exported_variables
from unidist_launch.observation.fixed_job import FixedJobEvents
from unidist_launch.options import hosts as host_list
from unidist_launch.output.lines import Stream
from unidist_launch.output.writer import Output
from unidist_launch.remote.ending import Ending
from unidist_launch.remote.failure import RankExit
from unidist_launch.remote.hosts import AgentProcess, AgentStarter, agent_error, end_all
from unidist_launch.remote.signals import ForwardedSignals
from unidist_launch.side_processes.roster import SideReports, SideRoster, drive_to_end, start_message

_TURN_SEC = 0.05
_MORE_REASONS_SEC = 1.0
_LOOPBACK = "127.0.0.1"
_VALUES_SEC = 10.0
_MAX_GUESTS = 1024


class RemoteRun:
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
        self._job = job
        self._guest_roles = dict(guests or {})
        self._guests: dict[int, Message] = {}
        self._has_values = job.has_side_processes or bool(guests)
        self._places = host_list.places(hosts) if places is None else places
        self._agents: list[AgentProcess] = []
        for index, (host, starter) in enumerate(zip(hosts, starters, strict=True)):
            leader = next((each for each in self._agents if each.starter is starter and starter.index_variable), None)
            self._agents.append(AgentProcess(index, host, starter, leader))
        self._host_of = {place.rank: i for i, places in enumerate(self._places) for place in places}
        self._facts: dict[int, Message] = {}
        self._pids: dict[int, int] = {}
        self._done: set[int] = set()
        self._lost: set[int] = set()
        self._refused: list[str] = []
        self._links = HostLinks(job.heartbeat.total_seconds())
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
        self._ending = Ending(
            job.grace_period,
            signal_ranks=lambda number: self._tell({"type": "signal", "number": number}),
            host_of=lambda rank: self._name(self._host_of[rank]),
            outlives_ranks=job.outlives_ranks,
        )
        self._output = stack.enter_context(Output.of_job(job, give_up=lambda: self._ending.is_overdue))
        self._events = FixedJobEvents(job, self._output, self._signal_rank, stack)
        self._secret = secret or secrets.token_bytes(32)
        num_agents = max(first_guest, len(hosts)) + _MAX_GUESTS if guests else len(hosts)
        self._coordinator = Coordinator(
            num_hosts=num_agents, world_size=job.num_proc, heartbeat=job.heartbeat, agents=self._host_of
        )
        observation = self._events.observation
        self._values = KeyValueService()
        reports = SideReports(
            self._output.message,
            observation.publish,
            observation.process_exited,
            self._ending.fail,
            lambda name, reason: self._server.call(lambda: self._values.note_end(name, reason)),
        )
        self._roster = SideRoster(job, self, reports, reserved=self._guest_roles)
        self._roster.check_hosts(len(self._first_agents))
        stack.callback(self._roster.close)
        service: Service = self._coordinator
        if self._has_values:
            service = WithKeyValues(service, self._values)
            observation.attach(self._roster, self._connect_values)
        self._server = ControlServer(service, self._secret, port=port)
        stack.callback(self._server.close)
        stack.callback(self._end_agents)
        stack.callback(self._tell, {"type": "end"})
        self._selector = stack.enter_context(selectors.DefaultSelector())
        self._signals = stack.enter_context(ForwardedSignals(self._ending.on_signal))

    def run(self) -> int:
        """Start the agents, then the ranks, and see them through; returns the exit code.

        Raises:
            ConfigurationError: a host did not come, or cannot run the command; nothing is left running.
        """
        self._selector.register(self._signals.wakeup_fd, selectors.EVENT_READ, self._signals.drain)
        self._selector.register(self._server.events_fd, selectors.EVENT_READ, lambda: None)
        self._start_agents()
        self._server.start()  # after the agents were forked: no other thread may run then
        self._await_agents()
        if not self._ending.has_begun:
            self._start_ranks()
        while self._is_running and len(self._done) < len(self._agents) and not self._ending.is_hopeless:
            self._turn()
            self._watch_commands()
            self._watch_links()
            self._events.turn()
            running = self._job.num_proc - len(self._ending.exits)
            self._output.show(running=running, state=self._events.summary)
            self._ending.advance(self._output)
            if refused := [*self._refused, *self._roster.refused]:
                raise ConfigurationError("; ".join(refused))
        code = self._ending.conclude(self._output)
        self._events.ended(code)
        drive_to_end(
            self._roster,
            turn=self._last_turn,
            finishing=self._events.observation.finishing,
            signals=self._ending.signals,
        )
        return code

    def _last_turn(self) -> None:
        self._turn()
        self._events.turn()
        self._output.show(running=0, state=self._events.summary)

    # The processes beside the ranks

    def start_side(self, host: int, number: int, process: SideProcess) -> None:
        """Have an agent start a process; for the roster."""
        if self._cluster is not None:
            process = replace(process, env={**self._cluster.of(process), **process.env})
        guest = self._guests.get(host)
        address = self._addresses[host] if guest is None else str(guest["address"])
        self._tell(start_message(number, process, address), [host])

    def signal_side(self, host: int, number: int, chosen: Sequence[int]) -> None:
        """Have an agent send a signal to processes; for the roster."""
        self._tell({"type": "side_signal", "number": number, "chosen": list(chosen)}, [host])

    def _welcome_guest(self, host: int, facts: Message) -> None:
        role = str(facts["role"])
        if role in self._guest_roles:
            self._guests[host] = facts
            self._roster.welcome(
                host, SideProcess(self._job.command, role, int(facts["role_index"])), self._guest_roles[role]
            )

    @property
    def _writes_tf_config(self) -> bool:
        return self._job.has_side_processes and not tf_config.is_given({**os.environ, **self._job.env})

    def _tf_cluster(self) -> tf_config.TfCluster | None:
        """Return what TF_CONFIG says of the job, with ports that agents have told; None if it is not written."""
        if not self._writes_tf_config:
            return None
        ports = {index: list(facts.get("ports", [])) for index, facts in self._facts.items()}

        def address(index: int) -> str:
            host = self._addresses[index]
            return f"[{host}]:{ports[index].pop()}" if ":" in host else f"{host}:{ports[index].pop()}"

        workers = [address(self._host_of[rank]) for rank in range(self._job.num_proc)]
        hosts = [self._roster.host_of(each) for each in tf_config.servers_of(self._job.side_processes)]
        return tf_config.TfCluster(tuple(workers), tuple(address(index) for index in hosts if index is not None))

    def _connect_values(self) -> KeyValues:
        return KeyValues(
            (_LOOPBACK, self._server.port),
            self._secret,
            rank=None,
            name="the launcher",
            served_by="it",
            timeout=timedelta(seconds=_VALUES_SEC),
        )

    # The agents and the ranks

    def _start_agents(self) -> None:
        job_id = secrets.token_hex(8)
        exported = exported_variables()
        most = max(len(places) for places in self._places)
        num_ports = most + len(self._job.side_processes) if self._writes_tf_config else 0
        for agent in self._agents:
            starter = agent.starter
            order = AgentOrder(
                version=__version__,
                host=agent.index,
                job_id=job_id,
                secret=self._secret.hex(),
                port=self._server.port,
                index_variable=starter.index_variable,
                indices=dict(starter.indices),
                tells_termination=starter.tells_termination,
                num_ports=num_ports,
                address_variable=starter.address_variable,
                launcher_addresses=starter.addresses or self._own_addresses(),
                network_interfaces=self._job.network_interfaces,
                command=self._job.command,
                env=dict(self._job.env),
                exported=exported if starter.exports else {},
                folder=os.getcwd(),
                heartbeat_sec=self._job.heartbeat.total_seconds(),
                connect_sec=min(10.0, self._job.start_timeout.total_seconds()),
            )
            try:
                agent.start(order)
            except OSError as exc:
                command = agent.starter.command(agent.host)[0]
                raise ConfigurationError(f"host {agent.host.name}: cannot start {command!r}: {exc}") from exc
            if agent.leader is not None or starter.comes_by_itself:
                continue
            assert agent.process is not None
            assert agent.process.stdin is not None
            assert agent.process.stdout is not None
            self._selector.register(agent.process.stdin, selectors.EVENT_WRITE, partial(self._give_order, agent))
            self._selector.register(agent.process.stdout, selectors.EVENT_READ, partial(self._hear, agent))
            if self._job.verbose:
                self._output.message(f"unidist: host {agent.host.name}: started its agent")

    def _await_agents(self) -> None:
        deadline = time.monotonic() + self._job.start_timeout.total_seconds()
        while len(self._facts) < len(self._agents) and not self._ending.has_begun:
            self._turn()
            self._output.show(running=0)
            failed = [agent for agent in self._missing() if _has_failed(agent)]
            now = time.monotonic()
            if failed:
                # Where one host fails, others may too: all are told at once.
                deadline = min(deadline, now + _MORE_REASONS_SEC)
            if now >= deadline or len(failed) == len(self._missing()) > 0:
                raise ConfigurationError(self._why_missing())

    def _start_ranks(self) -> None:
        self._check_places()
        addresses = self._addresses = [str(self._facts[i]["address"]) for i in range(len(self._agents))]
        if len(addresses) > 1:
            # An agent of this very host reached the launcher over loopback; the others know it by what they reached.
            outside = [str(f["launcher"]) for f in self._facts.values() if not is_loopback(str(f["launcher"]))]
            addresses = self._addresses = [outside[0] if is_loopback(item) and outside else item for item in addresses]
        self._roster.assign(self._first_agents)
        cluster = self._cluster = self._tf_cluster()
        self._roster.place(self._first_agents)  # before the ranks
        for i, places in enumerate(self._places):
            message: Message = {
                "type": "start",
                "places": [astuple(place) for place in places],
                "address": addresses[i],
                "master": addresses[0],
                "master_port": self._facts[0]["port"],
                "generation": self._coordinator.generation,
                "values": self._has_values,
                "of_each": [] if cluster is None else [cluster.of_rank(place.rank) for place in places],
            }
            self._tell(message, [i])
        for i in self._watched if len(self._watched) > 1 else ():
            self._tell({"type": "listen", "address": addresses[i]}, [i])
        self._is_running = True

    def _check_places(self) -> None:
        """Make sure that agents which should share a host do: what started them may have placed them otherwise.

        Raises:
            ConfigurationError: they do not.
        """
        names: dict[int, str] = {}
        for index, places in enumerate(self._places):
            name = str(self._facts[index]["name"])
            first = names.setdefault(places[0].node_rank, name)
            if name != first:
                raise ConfigurationError(
                    f"rank {places[0].rank} should be on host {self._name(index)}, as others that are on {first}, but "
                    f"it is on {name}: what starts the processes places them otherwise; name hosts in its order (-H)."
                )

    def _turn(self) -> None:
        """Wait for the next event and deal with it."""
        now = time.monotonic()
        due = [at for at in (self._output.deadline(), *self._ending.deadlines()) if at is not None and at > now]
        for key, _ in self._selector.select(max(0.0, min([now + _TURN_SEC, *due]) - now)):
            key.data()
        self._round += 1
        for event in self._server.take_events():
            if isinstance(event, HostJoined) and event.host >= len(self._agents):
                self._welcome_guest(event.host, event.facts)
            elif isinstance(event, HostJoined):
                facts = self._facts[event.host] = event.facts
                name = self._agents[event.host].host.name
                self._events.host_joined(event.host, name, address=str(facts["address"]), cores=int(facts["cores"]))
                if self._job.verbose:
                    self._output.message(
                        f"unidist: host {name} ({facts['name']}) is {facts['address']}, {facts['cores']} cores"
                    )
            elif isinstance(event, HostMessage):
                self._hear_host(event.host, event.message)
            elif isinstance(event, HostLost):
                self._lose_host(event.host, event.reason)
        self._roster.turn()

    def _hear_host(self, host: int, message: Message) -> None:
        kind = message["type"]
        if (num_bytes := self._roster.hear(message)) is not None:
            if num_bytes:
                self._tell({"type": "taken", "bytes": num_bytes}, [host])
        elif host in self._guests:
            return  # it has no ranks, and its own end is not the job's
        elif kind == "output":
            data = base64.b64decode(message["data"])
            self._output.feed(int(message["rank"]), Stream(message["stream"]), data)
            self._tell({"type": "taken", "bytes": len(data)}, [host])
        elif kind == "exits":
            for rank, pid, returncode in message["exits"]:
                self._note_exit(
                    RankExit(
                        rank,
                        pid,
                        returncode,
                        self._round,
                        self._output.stderr_tail(rank),
                        signalled=self._ending.has_begun,
                    )
                )
        elif kind == "started":
            pids = dict(zip((place.rank for place in self._places[host]), message["pids"], strict=True))
            self._pids.update(pids)
            self._events.started(host, pids)
            if len(self._pids) == self._job.num_proc:
                self._events.complete(self._job.num_proc)
            if self._job.verbose:
                for place in self._places[host]:
                    name = self._name(host)
                    self._output.message(f"unidist: rank {place.rank} is process {self._pids[place.rank]} on {name}")
        elif kind == "progress":
            self._events.progressed([(int(rank), report) for rank, report in message["reports"]])
        elif kind == "listening":
            self._links.listens(host, int(message["port"]))
            self._listening[host] = (self._addresses[host], int(message["port"]))
            if len(self._listening) == len(self._watched):
                self._connect_hosts()
        elif kind == "link":
            reached, silent_sec = bool(message["reached"]), float(message["silent_sec"])
            self._links.told(host, int(message["peer"]), reached=reached, silent_sec=silent_sec, now=time.monotonic())
        elif kind == "done":
            self._done.add(host)
        elif kind == "terminating":
            self._ending.on_signal(signal.SIGTERM)
        elif kind == "refused":
            self._refused.append(f"host {self._name(host)}: {message['text']}")

    def _connect_hosts(self) -> None:
        """Have the agents of all hosts keep links to each other."""
        for index in self._watched:
            peers = [[peer, *self._listening[peer]] for peer in self._links.peers(index)]
            self._tell({"type": "peers", "peers": peers}, [index])

    def _watch_links(self) -> None:
        """End the job if two hosts do not reach each other: their ranks would wait until the timeout of a call."""
        if not self._links.has_broken:
            return
        found = self._links.leave_out(self._watched, {}, time.monotonic())
        if found is not None:
            others = " and ".join(self._name(peer) for peer in found.unreached)
            self._ending.fail(
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
            self._roster.host_lost(host, reason)
            return
        name = self._agents[host].host.name
        said = self._agents[host].text.decode(errors="replace").strip()
        if not self._is_running:
            raise ConfigurationError(f"host {name} was lost before its ranks started: {reason} {said}")
        self._done.add(host)
        self._lost.add(host)
        self._links.lost(host)
        self._events.host_lost(name, reason)
        text = f"host {name} was lost: {reason}{'; ' + said.splitlines()[-1] if said else ''}"
        ended = {end.rank for end in self._ending.exits}
        for place in self._places[host]:
            if place.rank not in ended:
                self._note_exit(
                    RankExit(
                        place.rank,
                        self._pids.get(place.rank, 0),
                        1,
                        self._round,
                        signalled=self._ending.has_begun,
                        host_lost=text,
                    )
                )
        self._roster.host_lost(host, reason)

    def _note_exit(self, end: RankExit) -> None:
        is_lost = self._ending.note(end)
        self._events.exited(end.rank, end.pid, end.returncode)
        if is_lost:
            self._output.message(f"unidist: rank {end.rank} is lost ({end.reason}); the others go on without it")
            self._events.rank_lost(end.rank, end.reason)
        elif self._job.verbose:
            self._output.message(f"unidist: rank {end.rank} ended: {end.host_lost or describe_exit(end.returncode)}")

    def _give_order(self, agent: AgentProcess) -> None:
        agent.write()
        if not agent.wants_input:
            assert agent.process is not None
            assert agent.process.stdin is not None
            self._selector.unregister(agent.process.stdin)

    def _hear(self, agent: AgentProcess) -> None:
        """Read what ssh or the agent itself wrote: nothing unless there is a problem, or a banner."""
        data = agent.read()
        if data is None:
            assert agent.process is not None
            assert agent.process.stdout is not None
            self._selector.unregister(agent.process.stdout)
        elif self._job.verbose:
            for line in data.decode(errors="replace").splitlines():
                self._output.message(f"unidist: host {agent.host.name}: {line}")

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
            seconds = self._job.start_timeout.total_seconds()
            reasons.append(f"no answer from {names} in {seconds:g} seconds (--start-timeout)")
        return "not all hosts can take part.\n  " + "\n  ".join(reasons)

    def _name(self, host: int) -> str:
        return self._agents[host].host.name

    def _tell(self, message: Message, hosts: Sequence[int] | None = None) -> None:
        self._server.call(lambda: self._coordinator.tell(message, hosts))

    def _signal_rank(self, rank: int, number: int) -> None:
        self._tell({"type": "signal", "number": number, "ranks": [rank]}, [self._host_of[rank]])

    def _own_addresses(self) -> tuple[str, ...]:
        """Return this host's address on the interface that was asked for; none if none was, or it has other names."""
        try:
            return (interface_address(self._job.network_interfaces),) if self._job.network_interfaces else ()
        except ConfigurationError:
            return ()


def _has_failed(agent: AgentProcess) -> bool:
    """Say whether an agent that has not come never will; a command for several may go on for the others' sake."""
    if agent.process is None:
        return False
    shared = bool(agent.starter.index_variable)
    return agent.process.poll() is not None or (shared and bool(agent_error(agent.text.decode(errors="replace"))))
