"""One run of an elastic job: agents, workers and the coordinator, until the script has come to its end.

What the world is to be, the coordinator decides, in the control server's thread; this loop starts processes where
there is room for them, says how they ended, and gives up when nothing gets on.
"""

from __future__ import annotations

import base64
import secrets
import selectors
import signal
import time
from contextlib import ExitStack
from dataclasses import astuple, replace
from typing import Any

from unidist.control.coordinator import HostCame, HostLost, HostSaid
from unidist.control.elastic_coordinator import ElasticCoordinator, Happened
from unidist.control.membership import Membership
from unidist.control.server import ControlServer
from unidist.control.wire import Message
from unidist.errors import ConfigurationError
from unidist.launcher import ElasticLimits, Host, Job
from unidist.local_processes import describe_exit
from unidist.topology import Topology
from unidist_launch import hosts as host_list
from unidist_launch.elastic_discovery import Discovery
from unidist_launch.elastic_hosts import ElasticHost, ElasticHosts
from unidist_launch.elastic_log import EventLog
from unidist_launch.elastic_orders import Orders
from unidist_launch.elastic_patience import Patience
from unidist_launch.elastic_report import tell
from unidist_launch.elastic_slots import Slots
from unidist_launch.elastic_workers import StartedWorker, StartedWorkers
from unidist_launch.ending import Ending
from unidist_launch.failure import RankExit
from unidist_launch.lines import Stream
from unidist_launch.output import Output
from unidist_launch.signals import ForwardedSignals

_TURN_SEC = 0.05
_USEFUL_SEC = 10.0
_LEFT_PAUSE_SEC = 30.0
_STACKS_SEC = 0.5
_LOOPBACK = "127.0.0.1"
SILENCE_PER_HEARTBEAT = 2.0
"""A worker may be silent for longer than its host: Python's lock may be held for seconds by honest work."""


class ElasticRun:
    """Runs an elastic job. To be used once, from the main thread.

    Args:
        job: the job; `job.elastic` is set.
        stack: takes what has to be given back.

    Raises:
        ConfigurationError: the job cannot be started so.
    """

    def __init__(self, job: Job, stack: ExitStack) -> None:
        assert job.elastic is not None
        self._job = job
        self._limits: ElasticLimits = job.elastic
        hosts = job.hosts or (Host("localhost", self._limits.slots_per_host or job.num_proc),)
        self._is_here = all(map(host_list.is_local, hosts)) and self._limits.discovery_script is None
        self._log = EventLog(self._limits.event_log)
        stack.callback(self._log.close)
        self._slots = Slots(self._limits.cooldown)
        self._discovery: Discovery | None = None
        if self._limits.discovery_script is None:
            self._slots.offer(hosts)
        else:
            self._discovery = Discovery(self._limits.discovery_script, self._limits.slots_per_host)
            stack.callback(self._discovery.close)
        self._workers = StartedWorkers()
        self._patience = Patience(job.num_proc, self._limits.reset_limit)
        self._num_agents = 0
        self._round = 0
        self._generation = -1
        self._is_finishing = False
        self._host_names: dict[int, str] = {}  # by seat, for the report
        self._verdict = ""
        self._discovery_error = ""
        self._deadline: float | None = time.monotonic() + job.start_timeout.total_seconds()
        self._secret = secrets.token_bytes(32)
        self._ending = Ending(
            job.grace_period,
            signal_ranks=self._signal_all,
            host_of=lambda seat: self._host_names.get(seat, "?"),
        )
        self._output = stack.enter_context(
            Output(
                max(self._limits.max_num, job.num_proc),
                output_dir=job.output_dir,
                quiet=job.quiet,
                timestamps=job.timestamps,
                give_up=lambda: self._ending.is_overdue,
            )
        )
        self._log.listen(lambda event, fields: tell(self._output, event, fields))
        membership = Membership(num_first=job.num_proc, min_num=self._limits.min_num, max_num=self._limits.max_num)
        self._coordinator = ElasticCoordinator(
            membership,
            heartbeat=job.heartbeat,
            silence=SILENCE_PER_HEARTBEAT * job.heartbeat,
            stall=self._limits.stall,
        )
        self._server = ControlServer(self._coordinator, self._secret, host=_LOOPBACK if self._is_here else "")
        self._selector = stack.enter_context(selectors.DefaultSelector())
        orders = Orders(job, self._secret, self._server.port, is_here=self._is_here)
        self._hosts = ElasticHosts(orders.starter_of, orders.order_for, self._selector, self._coordinator_index)
        stack.callback(self._server.close)
        stack.callback(self._hosts.end)
        stack.callback(self._tell, {"type": "end"}, None)
        self._signals = stack.enter_context(ForwardedSignals(self._ending.on_signal))

    def run(self) -> int:
        """See the job through; returns the exit code.

        Raises:
            ConfigurationError: no host can run it; nothing is left running.
        """
        self._selector.register(self._signals.wakeup_fd, selectors.EVENT_READ, self._signals.drain)
        self._selector.register(self._server.events_fd, selectors.EVENT_READ, lambda: None)
        self._server.start()
        self._log.publish("job", command=list(self._job.command), num_proc=self._job.num_proc)
        while not self._is_over():
            self._discover()
            self._fill()
            self._turn()
            self._watch()
            self._output.show(running=len(self._workers))
            self._ending.advance(self._output)
        self._output.finish()
        code = self._conclude()
        self._log.publish("end", exit_code=code)
        return code

    def _is_over(self) -> bool:
        if self._ending.is_hopeless:
            return True
        if self._workers:
            return False
        return self._is_finishing or self._ending.has_begun

    def _conclude(self) -> int:
        if self._verdict:
            self._output.message(f"unidist: {self._verdict}")
        code = self._ending.conclude(self._output)
        return 1 if self._verdict and not code else code

    # What there should be

    def _discover(self) -> None:
        if self._discovery is None:
            return
        try:
            hosts = self._discovery.poll()
        except ConfigurationError as exc:
            if str(exc) != self._discovery_error:
                self._discovery_error = str(exc)
                self._output.message(f"unidist: host discovery: {exc}; the hosts stay as they are")
            return
        if hosts is None:
            return
        self._discovery_error = ""
        before = {name: self._slots.num_on(name) for name in self._slots.hosts}
        leaving = self._slots.offer(hosts)
        after = {host.name: host.slots for host in hosts}
        if before != after:
            self._log.publish("hosts", hosts=after)
        for number in leaving:
            self._retire(number)

    def _retire(self, number: int) -> None:
        worker = self._workers.get(number)
        if worker is not None and not worker.is_leaving:
            worker.is_leaving = True
            self._server.call(lambda: self._coordinator.retire(number, now=time.monotonic()))

    def _fill(self) -> None:
        """Start agents and workers where there is room."""
        if self._ending.has_begun or self._is_finishing:
            return
        now = time.monotonic()
        limit = self._limits.max_num if self._generation >= 0 else max(self._job.num_proc, self._limits.min_num)
        for slot in self._slots.free(now, limit):
            host = self._hosts.by_name.get(slot.host)
            if host is not None and host.is_up:
                slot.worker = self._start_worker(host)
            elif host is None or not host.is_terminating:
                try:
                    self._hosts.want(slot.host, now)
                except OSError as exc:
                    raise ConfigurationError(f"host {slot.host}: its agent cannot be started: {exc}") from exc

    def _start_worker(self, host: ElasticHost) -> int:
        worker = self._workers.add(host.index)
        number, seat = worker.number, worker.seat
        self._host_names[seat] = host.name
        index = host.index
        self._server.call(lambda: self._coordinator.expect_worker(number, index))
        assert host.facts is not None
        is_first = self._generation < 0 and seat < self._job.num_proc
        # For those who look at the variables before init(); what holds is what the coordinator says.
        is_known = is_first and self._is_here
        place = Topology(seat, self._job.num_proc, seat, self._job.num_proc) if is_known else Topology()
        self._tell(
            {
                "type": "start_worker",
                "worker": number,
                "seat": seat,
                "slots": self._slots.num_on(host.name),
                "place": list(astuple(place)),
                "address": self._hosts.address_of(host),
                "master": self._hosts.address_of(host),
            },
            index,
        )
        return number

    def _coordinator_index(self) -> int:
        """Have the coordinator await one more agent, and return its index."""
        index, self._num_agents = self._num_agents, self._num_agents + 1
        self._server.call(lambda: self._coordinator.expect_hosts(index + 1))
        return index

    # What happens

    def _turn(self) -> None:
        """Wait for the next event and deal with it."""
        now = time.monotonic()
        due = [self._output.deadline(), *self._ending.deadlines(), self._slots.next_free(now)]
        waits = [at - now for at in due if at is not None and at > now]
        for key, _ in self._selector.select(max(0.0, min([_TURN_SEC, *waits]))):
            key.data()
        self._round += 1
        for event in self._server.take_events():
            if isinstance(event, Happened):
                self._note(event.kind, event.fields)
            elif isinstance(event, HostCame):
                self._welcome(event.host, event.facts)
            elif isinstance(event, HostSaid):
                self._hear_host(event.host, event.message)
            elif isinstance(event, HostLost):
                self._lose_host(event.host, event.reason)

    def _welcome(self, index: int, facts: Message) -> None:
        host = self._hosts.by_index(index)
        if host is not None:
            self._hosts.came(host, facts)
            self._log.publish("host_joined", host=host.name, address=facts["address"], cores=facts["cores"])

    def _hear_host(self, index: int, message: Message) -> None:
        kind = message["type"]
        if kind == "output":
            data = base64.b64decode(message["data"])
            if data:
                self._output.feed(int(message["rank"]), Stream(message["stream"]), data)
                self._workers.wrote(int(message["rank"]), Stream(message["stream"]), data)
            self._tell({"type": "taken", "bytes": len(data)}, index)
        elif kind == "started":
            worker = self._workers.get(int(message["worker"]))
            if worker is not None:
                worker.pid = int(message["pid"])
                self._log.publish("process", worker=worker.number, seat=worker.seat, pid=worker.pid)
        elif kind == "ended":
            number = int(message["worker"])
            self._server.call(lambda: self._coordinator.process_ended(number, now=time.monotonic()))
        elif kind == "exit":
            self._end_worker(int(message["worker"]), int(message["returncode"]))
        elif kind == "refused":
            host = self._hosts.by_index(index)
            raise ConfigurationError(f"host {host.name if host else index}: {message['text']}")
        elif kind == "terminating":
            self._terminate_host(index)

    def _terminate_host(self, index: int) -> None:
        host = self._hosts.by_index(index)
        if host is not None and not host.is_terminating:
            host.is_terminating = True
            self._log.publish("host_terminating", host=host.name)
            for worker in self._workers.of_host(index):
                self._retire(worker.number)

    def _lose_host(self, index: int, reason: str) -> None:
        host = self._hosts.by_index(index)
        if host is None:
            return
        said = self._hosts.text(host)
        text = f"host {host.name} was lost: {reason}{'; ' + said if said else ''}"
        self._log.publish("host_lost", host=host.name, reason=reason)
        self._hosts.lost(host, time.monotonic())
        for worker in self._workers.of_host(index):
            self._end_worker(worker.number, 1, host_lost=text)

    def _end_worker(self, number: int, returncode: int, *, host_lost: str = "") -> None:
        """A worker's process has ended: say so, and see what follows from it."""
        worker = self._workers.remove(number)
        if worker is None:
            return
        now = time.monotonic()
        for stream, last in worker.last_bytes.items():
            if last != b"\n":  # the next worker of this seat begins a line of its own
                self._output.feed(worker.seat, stream, b"\n")
        succeeded = not returncode and not worker.has_left
        reason = host_lost or describe_exit(returncode)
        self._log.publish("exit", worker=number, seat=worker.seat, pid=worker.pid, returncode=returncode, reason=reason)
        self._server.call(
            lambda: self._coordinator.end_worker(number, reason, now=time.monotonic(), succeeded=succeeded)
        )
        if succeeded:
            self._finish()
            self._slots.vacated(number, now, pause=0.0)
        elif worker.has_left or (worker.is_leaving and not host_lost):
            self._slots.vacated(number, now, pause=_LEFT_PAUSE_SEC)
        else:
            self._note_failure(worker, returncode, host_lost, now)

    def _finish(self) -> None:
        """The script has come to its end on a rank: those that were never in a world have come too late."""
        self._is_finishing = True
        for worker in self._workers:
            if worker.joined is None and not worker.is_leaving:
                worker.is_leaving = True
                self._tell({"type": "signal", "number": int(signal.SIGTERM), "workers": [worker.number]}, worker.host)

    def _note_failure(self, worker: StartedWorker, returncode: int, host_lost: str, now: float) -> None:
        was_useful = worker.joined is not None and now - worker.joined >= _USEFUL_SEC
        tail = self._output.stderr_tail(worker.seat)
        end = RankExit(
            worker.seat,
            worker.pid,
            returncode,
            self._round,
            tail,
            signalled=self._ending.has_begun,
            host_lost=host_lost,
        )
        slot = self._slots.failed(worker.number, now, was_useful=was_useful or bool(host_lost))
        if self._ending.has_begun:
            self._ending.exits.append(end)
            return
        impatient = self._patience.failed(end)
        if self._is_finishing:
            self._ending.exits.append(end)
        elif slot is not None and slot.is_given_up and not slot.is_gone:
            self._log.publish("slot_given_up", host=slot.host, slot=slot.number, failures=slot.failures)
        if impatient:
            self._give_up(impatient)
        elif self._discovery is None and self._slots.num_usable < self._limits.min_num:
            self._give_up(
                f"{self._slots.num_usable} slots are left that have not failed again and again, and --min-np is "
                f"{self._limits.min_num}"
            )

    def _give_up(self, text: str) -> None:
        """End the job, and blame what failed first since something was achieved."""
        if self._ending.has_begun or self._verdict:
            return
        self._verdict = f"the job has ended: {text}"
        self._log.publish("give_up", reason=text)
        self._ending.exits += [replace(end, signalled=False) for end in self._patience.failures]
        if not self._workers or not self._patience.failures:
            self._ending.begin(signal.SIGTERM)

    def _note(self, kind: str, fields: dict[str, Any]) -> None:
        """The coordinator has done something."""
        now = time.monotonic()
        self._log.publish(kind, **fields)
        worker = self._workers.get(int(fields.get("worker", -1)))
        if kind == "generation":
            self._begin_generation(fields, now)
        elif kind == "short":
            self._deadline = now + self._limits.timeout.total_seconds()
        elif kind == "enough":
            self._deadline = None
        elif kind == "leaving" and worker is not None:
            worker.is_leaving = True
        elif kind == "left" and worker is not None:
            worker.is_leaving = worker.has_left = True
        elif kind == "hung" and worker is not None:
            # Its stacks first, if it still can show them; then it is killed.
            worker.kill_at = now + _STACKS_SEC
            self._tell({"type": "signal", "number": int(signal.SIGUSR2), "workers": [worker.number]}, worker.host)

    def _begin_generation(self, fields: dict[str, Any], now: float) -> None:
        self._generation = int(fields["generation"])
        self._deadline = None
        for number in fields["workers"]:
            worker = self._workers.get(number)
            if worker is not None and worker.joined is None:
                worker.joined = now
        impatient = self._patience.world_began(int(fields["progress"]))
        if impatient:
            self._give_up(impatient)

    def _watch(self) -> None:
        """Look at what nobody reports: agents that do not come, deadlines, workers that hang."""
        now = time.monotonic()
        self._hosts.reap()
        for host, why in self._hosts.failed():
            self._log.publish("host_failed", host=host.name, reason=why)
            self._hosts.lost(host, now)
            none_came = all(each.failures and not each.is_up for each in self._hosts.by_name.values())
            if none_came and self._generation < 0 and self._discovery is None:
                raise ConfigurationError(f"host {host.name}: {why}")
        for worker in self._workers:
            if worker.kill_at is not None and now >= worker.kill_at:
                worker.kill_at = None
                self._tell({"type": "signal", "number": int(signal.SIGKILL), "workers": [worker.number]}, worker.host)
        if not self._workers and self._deadline is None:  # nobody waits who could be short of others
            self._deadline = now + self._limits.timeout.total_seconds()
        if self._deadline is not None and now >= self._deadline and not self._ending.has_begun:
            self._deadline = None
            self._out_of_time()

    def _out_of_time(self) -> None:
        if self._generation < 0 and not self._coordinator.membership.accepts_fewer:
            # Horovod's order: -np is what one wishes, --min-np what one needs.
            self._deadline = time.monotonic() + self._limits.timeout.total_seconds()
            self._server.call(lambda: self._coordinator.accept_fewer(now=time.monotonic()))
            return
        seconds = self._limits.timeout.total_seconds()
        self._give_up(
            f"there were fewer than {self._limits.min_num} processes (--min-np) for {seconds:g} seconds "
            "(--elastic-timeout)"
        )

    # Words to the agents

    def _signal_all(self, number: int) -> None:
        self._tell({"type": "signal", "number": number}, None)

    def _tell(self, message: Message, index: int | None) -> None:
        hosts = None if index is None else [index]
        self._server.call(lambda: self._coordinator.tell(message, hosts))


__all__ = ["ElasticRun"]
