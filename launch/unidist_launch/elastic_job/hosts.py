"""The hosts of an elastic job and their agents, which come and go while it runs."""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from unidist.control.wire import Message
from unidist.jobs.network import is_loopback
from unidist.launcher import Host
from unidist_launch.agent.order import AgentOrder
from unidist_launch.remote.hosts import AgentProcess, AgentStarter, end_all

FIRST_PAUSE_SEC = 1.0
LONGEST_PAUSE_SEC = 60.0
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
    """

    name: str
    index: int = -1
    agent: AgentProcess | None = None
    facts: Message | None = None
    failures: int = 0
    came_at: float = 0.0
    free_at: float = 0.0
    listens_at: str = ""
    is_terminating: bool = False
    is_awaited: bool = False

    @property
    def is_up(self) -> bool:
        """Say whether its agent is there."""
        return self.facts is not None and not self.is_terminating


class ElasticHosts:
    """Starts agents where they are wanted and finds out what became of them.

    Args:
        starter_of: how the agent of a host is started.
        order_for: returns the orders of the agent of this index.
        selector: of the launcher's loop.
        next_index: gives the next agent its index, and has the coordinator await it.
    """

    def __init__(
        self,
        starter_of: Callable[[Host], AgentStarter],
        order_for: Callable[[int, AgentStarter], AgentOrder],
        selector: selectors.BaseSelector,
        next_index: Callable[[], int],
    ) -> None:
        self._starter_of = starter_of
        self._order_for = order_for
        self._selector = selector
        self._next_index = next_index
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
        assert agent.process.stdin is not None
        assert agent.process.stdout is not None
        self._selector.register(agent.process.stdin, selectors.EVENT_WRITE, partial(self._give_order, agent))
        self._selector.register(agent.process.stdout, selectors.EVENT_READ, partial(self._hear, agent))

    def failed(self) -> list[tuple[ElasticHost, str]]:
        """Return the hosts whose agents have ended before they came, and why."""
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
                found.append((host, agent.why()))
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

    def came(self, host: ElasticHost, facts: Message, now: float) -> None:
        """The agent of a host is there."""
        host.facts = facts
        self._outside = None
        host.listens_at = ""
        host.came_at = now
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
        """Say whether there are agents that are no children of this process."""
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
            self._unregister(agent)
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
        address = str(host.facts["address"])
        if not is_loopback(address):
            return address
        if self._outside is None:
            reached = (str(each.facts["launcher"]) for each in self.by_name.values() if each.facts is not None)
            self._outside = next((each for each in reached if not is_loopback(each)), "")
        return self._outside or address

    def reap(self) -> None:
        """Let go of the processes of lost agents that have ended."""
        for agent in [each for each in self._old if each.process is not None and each.process.poll() is not None]:
            self._old.remove(agent)
            end_all([agent], patient_with=[])

    def _retire(self, agent: AgentProcess) -> None:
        self._unregister(agent)
        if agent.process is None:
            agent.starter.dismiss(agent.host, patient=False)
            return
        with contextlib.suppress(ProcessLookupError):
            agent.process.terminate()
        self._old.append(agent)

    def _unregister(self, agent: AgentProcess) -> None:
        if agent.process is None:
            return
        for pipe in (agent.process.stdin, agent.process.stdout):
            if pipe is not None and not pipe.closed and pipe.fileno() in self._selector.get_map():
                self._selector.unregister(pipe)

    def _give_order(self, agent: AgentProcess) -> None:
        agent.write()
        if not agent.wants_input:
            assert agent.process is not None
            assert agent.process.stdin is not None
            self._selector.unregister(agent.process.stdin)

    def _hear(self, agent: AgentProcess) -> None:
        if agent.read() is None:
            assert agent.process is not None
            assert agent.process.stdout is not None
            self._selector.unregister(agent.process.stdout)
