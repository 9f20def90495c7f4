"""The ranks of one host, as the launcher sees them over a connection: their output, their ends, signals to them."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Self

from unidist.control.codec import Message, WireError
from unidist.control.connection import Connection, ConnectionLost
from unidist.control.coordinator import BEATS_PER_LIMIT
from unidist.control.messages import (
    Beat,
    Done,
    End,
    Exits,
    Failed,
    Goodbye,
    HostFacts,
    LinkState,
    Listen,
    Listening,
    Output,
    Peers,
    Progress,
    Refused,
    SideExit,
    SideOutput,
    SideRefused,
    SideSignal,
    SideStart,
    SideStarted,
    Signal,
    Start,
    Started,
    Taken,
    Terminating,
)
from unidist.control.standstill import Standstill
from unidist.errors import ConfigurationError
from unidist.jobs.network import is_loopback
from unidist.jobs.processes import HostShare, LocalProcesses, free_ports, watch_exit
from unidist.jobs.side_processes import SideProcesses
from unidist.topology import Topology
from unidist_launch.agent.links import PeerLinks
from unidist_launch.agent.order import AgentOrder
from unidist_launch.output.lines import Stream
from unidist_launch.side_processes.host import SideHost

_TURN_SEC = 0.05
_LAST_OUTPUT_SEC = 1.0
_REPORTS_SEC = 0.5
_GOODBYE_SEC = 1.0
_READ_BYTES = 1 << 16
_MAX_READS = 256
_MAX_UNTAKEN_BYTES = 4 << 20
"""Output that the launcher has not taken yet; with more, ranks wait for their pipes as they do for a slow terminal."""


class _Pipe(NamedTuple):
    rank: int
    stream: Stream


class AgentRanks:
    """Runs the host's ranks. A context manager; leaving it kills what is left and closes the connection.

    Args:
        order: the agent's orders.
        connection: to the control server.
        server: address at which this host reaches the control server.
        address: at which the other hosts reach this one.

    Attributes:
        turn_sec: longest time between two looks at what no event tells.
    """

    turn_sec: ClassVar[float] = _TURN_SEC

    def __init__(self, order: AgentOrder, connection: Connection, *, server: str, address: str) -> None:
        self._order = order
        self._connection = connection
        self._reached = server
        self._server = f"[{server}]:{order.port}" if ":" in server else f"{server}:{order.port}"
        self._address = address
        self._heartbeat_sec = order.heartbeat_sec
        self._heard = self._beat = self._reported = time.monotonic()
        self._standstill = Standstill()
        # On its own host a launcher that is silent was stopped, or is slow; one that has died closes the connection.
        self._silence_sec = float("inf") if is_loopback(server) else order.heartbeat_sec
        self._processes: LocalProcesses | None = None
        self._places: tuple[Topology, ...] = ()
        self._ended: set[int] = set()
        self._is_done = self._may_leave = False
        self._side: SideHost | None = None
        self._num_untaken = 0
        self._stack = ExitStack()
        self._stack.callback(lambda: self._connection.close())
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._pipes = self._stack.enter_context(selectors.DefaultSelector())
        self._selector.register(connection, selectors.EVENT_READ, self._receive)
        self._links = PeerLinks(bytes.fromhex(order.secret), order.heartbeat_sec, self._selector, self._tell_link)
        self._stack.callback(self._links.close)

    def introduce(self) -> None:
        """Say who this is, and what this host is like; before `run`.

        Raises:
            ConnectionLost: the launcher is gone.
        """
        self._connection.send(self._facts())

    def run(self) -> None:
        """Do what the launcher says until it has no more use for this agent.

        Raises:
            ConnectionLost: the launcher is gone, or silent for too long.
        """
        self._watch_termination()
        while not self._may_leave:
            self._turn()
            if self._processes is not None and not self._is_done:
                self._collect_exits()
                if len(self._ended) == len(self._places):
                    self._finish()
            self._collect_side()
        self._send(Goodbye())
        deadline = time.monotonic() + _GOODBYE_SEC
        while self._connection.pending_bytes and time.monotonic() < deadline:
            self._turn()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _facts(self) -> HostFacts:
        port, *ports = free_ports(1 + self._order.num_ports, self._address)
        return HostFacts(
            host=self._order.host,
            name=socket.gethostname(),
            address=self._address,
            launcher=self._reached,
            port=port,
            ports=tuple(ports),
            role=self._order.role,
            role_index=self._order.role_index,
            cores=len(os.sched_getaffinity(0)),
            pid=os.getpid(),
        )

    def _turn(self) -> None:
        """Wait for the next event and deal with it; keep up the heartbeat."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._connection.pending_bytes else 0)
        if self._selector.get_key(self._connection).events != wanted:
            self._selector.modify(self._connection, wanted, self._receive)
        self._look()
        now = time.monotonic()
        self._heard = min(now, self._heard + self._standstill.turn(now))
        if now - self._beat >= self._heartbeat_sec / BEATS_PER_LIMIT:
            self._beat = now
            self._send(Beat())
        if now - self._reported >= _REPORTS_SEC:
            self._reported = now
            self._send_reports()
        if now - self._heard > self._silence_sec:
            raise ConnectionLost(f"nothing was heard of the launcher for {now - self._heard:.1f} seconds")

    def _send_reports(self) -> None:
        reports = self._new_reports()
        if reports:
            self._send(Progress(tuple(reports)))

    def _new_reports(self) -> list[tuple[int, dict[str, Any]]]:
        """Return new progress reports, with the rank of each, or the worker's number."""
        if self._processes is None:
            return []
        return [(self._places[i].rank, report) for i, report in self._processes.new_reports()]

    def _look(self) -> None:
        """Wait a moment for what comes from ranks, the launcher, other agents and signals, and deal with it."""
        for key, _ in self._selector.select(self.turn_sec):
            key.data()
        self._watch_pipes()
        self._links.turn()

    def _watch_termination(self) -> None:
        """Tell the launcher when this agent gets SIGTERM, as from a scheduler that wants its host: it ends the job.

        A handler, not SIG_IGN, which the ranks would inherit.
        """
        read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stack.callback(os.close, read_end)
        self._stack.callback(os.close, write_end)

        def tell() -> None:
            os.read(read_end, 4096)
            if self._order.tells_termination:
                self._send(Terminating())

        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, -1)
        self._selector.register(read_end, selectors.EVENT_READ, tell)

    def _read_pipes(self) -> None:
        for key, _ in self._pipes.select(0):
            self._read(key.fd, key.data)

    def _watch_pipes(self) -> None:
        """Look at the pipes only while the launcher keeps up with what it is sent."""
        wanted = self._num_untaken < _MAX_UNTAKEN_BYTES
        sources: list[tuple[Any, Callable[[], None]]] = [(self._pipes, self._read_pipes)]
        if self._side is not None:
            sources.append((self._side, self._side.read))
        for source, read in sources:
            if wanted != (source in self._selector.get_map()):
                if wanted:
                    self._selector.register(source, selectors.EVENT_READ, read)
                else:
                    self._selector.unregister(source)

    def _receive(self) -> None:
        self._connection.flush()
        try:
            messages = self._connection.receive()
        except WireError as exc:
            raise ConnectionLost(str(exc)) from exc
        for message in messages:
            self._heard = time.monotonic()
            self._obey(message)

    def _obey(self, message: Message) -> None:
        match message:
            case Start():
                self._start(message)
            case Signal(number, ranks):
                self._signal(number, ranks)
            case Taken(num_bytes):
                self._num_untaken -= num_bytes
            case SideStart():
                self._start_side(message)
            case SideSignal(number, chosen):
                if self._side is not None:
                    self._side.signal(number, chosen)
            case Listen(address):
                self._listen(address)
            case Peers(peers):
                self._links.connect({index: (host, port) for index, host, port in peers})
            case End():
                self._may_leave = True
            case Failed(text=text):
                raise ConfigurationError(text)

    def _signal(self, number: int, ranks: tuple[int, ...] | None) -> None:
        if self._processes is not None:
            chosen = None if ranks is None else [i for i, each in enumerate(self._places) if each.rank in ranks]
            self._processes.signal(number, chosen)

    def _listen(self, address: str) -> None:
        try:
            port = self._links.listen(address)
        except OSError:  # an address that is not this host's own, as behind a router: its links are not watched
            port = 0
        self._send(Listening(port))

    def _tell_link(self, peer: int, reached: bool, silent_sec: float) -> None:
        self._send(LinkState(peer, reached, silent_sec))

    def _start(self, message: Start) -> None:
        self._places = message.places
        variables = {
            "UNIDIST_CONTROL_ADDRESS": self._server,
            "UNIDIST_HOST_ADDRESS": message.address,
            "UNIDIST_GENERATION": str(message.generation),
            **({"UNIDIST_JOB_VALUES": self._server} if message.values else {}),
        }
        defaults = {"MASTER_ADDR": message.master, "MASTER_PORT": str(message.master_port)}
        secret = bytes.fromhex(self._order.secret)
        # Ranks of a host meet by what stands before the slash; each agent sweeps its own, by all of it.
        job_id = f"{self._order.job_id}.{self._places[0].node_rank}/{self._order.host}"
        share = HostShare(job_id, secret, self._places, variables, defaults, message.of_each)
        try:
            self._processes = self._stack.enter_context(
                LocalProcesses(len(self._places), env=self._order.env, die_with_thread=True, share=share)
            )
            pids = [self._start_rank(place.rank) for place in self._places]
        except ConfigurationError as exc:
            self._send(Refused(str(exc)))
            self._ended = {place.rank for place in self._places}
            self._is_done = True
            return
        self._send(Started(tuple(pids)))

    def _start_rank(self, rank: int) -> int:
        assert self._processes is not None
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        process = self._processes.start(self._order.command, stdin=null, stdout=pipe, stderr=pipe)
        for stream, file in ((Stream.STDOUT, process.stdout), (Stream.STDERR, process.stderr)):
            assert file is not None
            self._stack.callback(file.close)
            os.set_blocking(file.fileno(), False)
            self._pipes.register(file, selectors.EVENT_READ, _Pipe(rank, stream))
        exit_fd = watch_exit(process)
        if exit_fd is not None:
            self._stack.callback(os.close, exit_fd)
            self._selector.register(exit_fd, selectors.EVENT_READ, partial(self._selector.unregister, exit_fd))
        return process.pid

    def _read(self, fd: int, pipe: _Pipe) -> bool:
        """Read once from a rank's pipe and pass it on; False when there is nothing more at the moment."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._pipes.unregister(fd)
        self._pass_on(pipe, data)
        return bool(data)

    def _pass_on(self, pipe: _Pipe, data: bytes) -> None:
        self._num_untaken += len(data)
        self._send(Output(pipe.rank, int(pipe.stream), data))

    def _collect_exits(self) -> None:
        assert self._processes is not None
        exits = []
        for place, process in zip(self._places, self._processes.processes, strict=True):
            if place.rank in self._ended or process.poll() is None:
                continue
            self._ended.add(place.rank)
            for key in [key for key in self._pipes.get_map().values() if key.data.rank == place.rank]:
                for _ in range(_MAX_READS):
                    if not self._read(key.fd, key.data):
                        break
            exits.append((place.rank, process.pid, process.returncode))
        if exits:
            self._send_reports()  # the last ones, before observers hear of the end
            self._send(Exits(tuple(exits)))

    def _finish(self) -> None:
        """All ranks have ended: end what they left behind, and say so."""
        assert self._processes is not None
        self._processes.close()
        deadline = time.monotonic() + _LAST_OUTPUT_SEC
        while (keys := list(self._pipes.get_map().values())) and time.monotonic() < deadline:
            read = [self._read(key.fd, key.data) for key in keys]
            if not any(read):
                self._pipes.select(_TURN_SEC)
        self._is_done = True
        self._send(Done())

    # Processes beside the ranks

    def _start_side(self, message: SideStart) -> None:
        if self._side is None:
            processes = SideProcesses(
                job_id=f"{self._order.job_id}.{self._order.host}",
                secret=bytes.fromhex(self._order.secret),
                env=self._order.env,
                host_address=message.address,
                values=self._server,
                die_with_thread=True,
            )
            self._side = SideHost(processes, self, heartbeat_sec=self._order.heartbeat_sec)
            self._stack.callback(self._end_side)
        self._side.start(message.number, message.process)

    def _collect_side(self) -> None:
        if self._side is not None:
            self._side.collect()

    def _end_side(self) -> None:
        """Kill the processes beside the ranks that are left."""
        side, self._side = self._side, None
        if side is not None:
            if side in self._selector.get_map():
                self._selector.unregister(side)
            side.close()

    def side_started(self, number: int, pid: int) -> None:
        """Tell the launcher; as `SideListener`, with the next three."""
        self._send(SideStarted(number, pid))

    def side_refused(self, number: int, text: str) -> None:
        """Tell the launcher."""
        self._send(SideRefused(number, text))

    def side_printed(self, number: int, data: bytes) -> None:
        """Tell the launcher."""
        self._num_untaken += len(data)
        self._send(SideOutput(number, data))

    def side_ended(self, number: int, returncode: int) -> None:
        """Tell the launcher."""
        self._send(SideExit(number, returncode))

    def _send(self, message: Message) -> None:
        self._connection.send(message)


__all__ = ["AgentRanks"]
