"""The hosts of an elastic job and their agents, which come and go while it runs."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unidist.control.messages import HostFacts
from unidist.jobs.liveness import StopWatch
from unidist.jobs.network import is_loopback
from unidist.launcher import Host
from unidist_launch.agent.order import AgentOrder
from unidist_launch.remote.hosts import AgentProcess, AgentStarter, end_all

FIRST_PAUSE_SEC = 1.0
LONGEST_PAUSE_SEC = 60.0
_MOST_KILLED = 3
STEADY_SEC = 60.0
"""A host that was there for so long is no flapping one: when it is lost, pauses begin with the shortest again."""


@dataclass(eq=False)
class ElasticHost:
    """A host, and its present agent.

    Args:
        name: of the host.
        index: of the present agent among all that the job has had; -1 while there is none.
        agent: the process here that leads to it; None for an agent that a launcher before this one has started.
        facts: what it said of its host; None until it has come.
        failures: agents in a row that did not come, or were lost soon.
        came_at: when the present agent came.
        free_at: when another one may be started.
        listens_at: address at which its agent was told to listen for those of the others; "" if it was not.
        is_terminating: a scheduler takes the host back; nothing is started there any more.
        is_awaited: the agent was started by a launcher before this one, and has not come back yet.
        stops: of the process here that leads to the present agent.
        was_killed: the last agent was killed or stopped before it came, and did not end by itself.
    """

    name: str
    index: int = -1
    agent: AgentProcess | None = None
    facts: HostFacts | None = None
    failures: int = 0
    came_at: float = 0.0
    free_at: float = 0.0
    listens_at: str = ""
    is_terminating: bool = False
    is_awaited: bool = False
    stops: StopWatch | None = None
    was_killed: bool = False

    @property
    def is_up(self) -> bool:
        """Return whether its agent is there."""
        return self.facts is not None and not self.is_terminating

    @property
    def is_hopeless(self) -> bool:
        """Return whether another agent would not come either: one has ended by itself, or several were killed."""
        return bool(self.failures) and not self.is_up and (not self.was_killed or self.failures >= _MOST_KILLED)


class ElasticHosts:
    """Starts agents where they are wanted and finds out what became of them.

    Args:
        starter_of: how the agent of a host is started.
        order_for: returns the orders of the agent of this index.
        selector: of the launcher's loop.
        next_index: gives the next agent its index, and has the coordinator await it.
        stopped_sec: an agent that was stopped for so long before it has come is killed.
    """

    def __init__(
        self,
        starter_of: Callable[[Host], AgentStarter],
        order_for: Callable[[int, AgentStarter], AgentOrder],
        selector: selectors.BaseSelector,
        next_index: Callable[[], int],
        stopped_sec: float,
    ) -> None:
        self._starter_of = starter_of
        self._order_for = order_for
        self._selector = selector
        self._next_index = next_index
        self._stopped_sec = stopped_sec
        self._old: list[AgentProcess] = []
        self._outside: str | None = ""  # an address of this host that others have reached; None: to be looked up
        self.by_name: dict[str, ElasticHost] = {}

    def by_index(self, index: int) -> ElasticHost | None:
        """Return the host whose present agent has this index."""
        return next((host for host in self.by_name.values() if host.index == index), None)

    def want(self, name: str, now: float) -> None:
        """Start the agent of a host, unless there is one or it pauses.

        Raises:
            OSError: the command cannot be started.
        """
        host = self.by_name.setdefault(name, ElasticHost(name))
        if host.index >= 0 or now < host.free_at:
            return
        where = Host(name, 1)
        starter = self._starter_of(where)
        host.index = self._next_index()
        agent = AgentProcess(host.index, where, starter)
        agent.start(self._order_for(host.index, starter))
        host.agent, host.facts, host.is_terminating = agent, None, False
        if agent.process is None:  # it comes by itself
            return
        host.stops = StopWatch(agent.process.pid)
        agent.watch(self._selector)

    def failed(self, now: float) -> list[tuple[ElasticHost, str]]:
        """Return the hosts whose agents have ended before they came, or were stopped, and why."""
        found = []
        for host in self.by_name.values():
            agent = host.agent
            if agent is None or host.facts is not None:
                continue
            if agent.process is None:
                if problem := agent.starter.problem(agent.host):
                    found.append((host, problem))
            elif agent.process.poll() is not None:
                while agent.read():
                    pass
                host.was_killed = agent.process.returncode < 0
                found.append((host, agent.why()))
            elif host.stops is not None and host.stops.seconds(now) > self._stopped_sec:
                agent.process.kill()
                host.was_killed = True
                found.append((host, f"its agent was stopped for {self._stopped_sec:g} seconds before it came"))
        return found

    def lost(self, host: ElasticHost, now: float) -> None:
        """Forget the agent of a host; another one may be started after a pause."""
        if host.agent is not None:
            self._retire(host.agent)
        was_steady = host.facts is not None and now - host.came_at >= STEADY_SEC
        host.failures = 1 if was_steady else host.failures + 1
        host.agent, host.facts, host.index, host.is_awaited = None, None, -1, False
        self._outside = None
        host.free_at = now + min(LONGEST_PAUSE_SEC, FIRST_PAUSE_SEC * 2.0 ** (host.failures - 1))

    def came(self, host: ElasticHost, facts: HostFacts, now: float) -> None:
        """The agent of a host is there."""
        host.facts = facts
        self._outside = None
        host.listens_at = ""
        host.came_at = now
        host.was_killed = False
        host.is_awaited = False

    def snapshot(self) -> list[list[str | int]]:
        """Return the hosts that have an agent, with its index. Plain data."""
        return [[host.name, host.index] for host in self.by_name.values() if host.index >= 0]

    def restore(self, kept: list[list[Any]]) -> None:
        """Await the agents that `snapshot` returned."""
        for name, index in kept:
            self.by_name[str(name)] = ElasticHost(str(name), index=int(index), is_awaited=True)

    @property
    def has_taken_over(self) -> bool:
        """Return whether there are agents that are no children of this process."""
        return any(host.index >= 0 and host.agent is None for host in self.by_name.values())

    def text(self, host: ElasticHost) -> str:
        """Return the last line that the agent of a host, or ssh, wrote."""
        if host.agent is None:
            return ""
        lines = host.agent.text.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def end(self) -> None:
        """End all agents; those that are there have a moment to end by themselves."""
        present = [host.agent for host in self.by_name.values() if host.agent is not None]
        patient_agents = [
            host.agent for host in self.by_name.values() if host.agent is not None and host.facts is not None
        ]
        for agent in present:
            agent.unwatch(self._selector)
        end_all([*present, *self._old], patient_with=patient_agents)
        self._old.clear()
        for agent in present:
            if agent.process is None:
                agent.starter.dismiss(agent.host, patient=agent in patient_agents)

    def present(self) -> list[ElasticHost]:
        """Return the hosts whose agents are there."""
        return [host for host in self.by_name.values() if host.facts is not None]

    def address_of(self, host: ElasticHost) -> str:
        """Return the address at which the others reach a host; the launcher's own is known by what they reached."""
        assert host.facts is not None
        address = host.facts.address
        if not is_loopback(address):
            return address
        if self._outside is None:
            reached = (each.facts.launcher for each in self.by_name.values() if each.facts is not None)
            self._outside = next((each for each in reached if not is_loopback(each)), "")
        return self._outside or address

    def reap(self) -> None:
        """Let go of the processes of lost agents that have ended."""
        for agent in [each for each in self._old if each.process is not None and each.process.poll() is not None]:
            self._old.remove(agent)
            end_all([agent], patient_with=[])

    def _retire(self, agent: AgentProcess) -> None:
        agent.unwatch(self._selector)
        if agent.process is None:
            agent.starter.dismiss(agent.host, patient=False)
            return
        with contextlib.suppress(ProcessLookupError):
            agent.process.terminate()
        self._old.append(agent)
