"""What a job over agents does with what they say, whether its ranks are all started at once or come and go."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from unidist.control.codec import Message
from unidist.control.coordinator import Coordinator, HostJoined, HostLost, HostMessage
from unidist.control.elastic import HostLinks
from unidist.control.messages import (
    HostFacts,
    LinkState,
    Listening,
    Output,
    Progress,
    SideSignal,
    SideStart,
    Taken,
)
from unidist.control.server import ControlServer
from unidist.launcher import SideProcess
from unidist_launch.observation.observation import Observation
from unidist_launch.output.lines import Stream
from unidist_launch.side_processes.roster import SideRoster

__all__ = ["AgentLoop"]


class AgentLoop(ABC):
    """The part that such jobs have in common. A subclass sets the attributes.

    Attributes:
        server: the control server.
        coordinator: what it serves.
        links: which hosts reach each other.
        roster: the processes beside the ranks.
        observation: of the job's observers.
    """

    server: ControlServer
    coordinator: Coordinator
    links: HostLinks
    roster: SideRoster
    observation: Observation

    def tell(self, message: Message, host: int | None = None) -> None:
        """Send a message to the agent of a host; None: to all."""
        hosts = None if host is None else [host]
        self.server.call(lambda: self.coordinator.tell(message, hosts))

    def start_side(self, host: int, number: int, process: SideProcess) -> None:
        """Have an agent start a process; for the roster."""
        self.tell(SideStart(number, process, self._address_of(host)), host)

    def signal_side(self, host: int, number: int, chosen: Sequence[int]) -> None:
        """Have an agent send a signal to processes; for the roster."""
        self.tell(SideSignal(number, tuple(chosen)), host)

    def take_events(self) -> None:
        """Deal with what the control server has published."""
        for event in self.server.take_events():
            match event:
                case HostJoined(host, facts):
                    self._welcome(host, facts)
                case HostMessage(host, message):
                    self._hear_host(host, message)
                case HostLost(host, reason):
                    self._lose_host(host, reason)
                case _:
                    self._hear_coordinator(event)

    def _hear_host(self, host: int, message: Message) -> None:
        """An agent has said something."""
        num_bytes = self.roster.hear(message)
        if num_bytes:
            self.tell(Taken(num_bytes), host)
        elif num_bytes is None:
            self._hear_of_ranks(host, message)

    def _hear_of_ranks(self, host: int, message: Message) -> None:
        """An agent has said something of its ranks, or of its host."""
        match message:
            case Output(rank, stream, data):
                self._printed(rank, Stream(stream), data)
                self.tell(Taken(len(data)), host)
            case Progress(reports):
                for number, report in reports:
                    self.observation.progressed(number, report)
            case Listening(port):
                self.links.listens(host, port)
                self._listens(host, port)
            case LinkState(peer, reached, silent_sec):
                self.links.told(host, peer, reached=reached, silent_sec=silent_sec, now=time.monotonic())

    def _hear_coordinator(self, event: object) -> None:
        """Deal with an event that is not an agent's."""
        raise AssertionError(f"unknown event {event}")

    @abstractmethod
    def _address_of(self, host: int) -> str:
        """Return the address at which other hosts reach this one."""

    @abstractmethod
    def _welcome(self, host: int, facts: HostFacts) -> None:
        """An agent has come."""

    @abstractmethod
    def _lose_host(self, host: int, reason: str) -> None:
        """An agent is gone."""

    @abstractmethod
    def _printed(self, rank: int, stream: Stream, data: bytes) -> None:
        """A rank has written something; nothing: it writes no more."""

    @abstractmethod
    def _listens(self, host: int, port: int) -> None:
        """An agent listens for others at this port; 0: it cannot."""
