"""The program of the ranks: `python -m unidist_bench.measurement.program ORDER`, under a launcher.

Rank 0 prints a line of JSON for each thing that it has to tell, see `tell`. The command reads them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import unidist
from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.errors import ConfigurationError, PeerLostError
from unidist.jobs import run_program
from unidist.negotiation import gather_objects
from unidist.runtime import Context, context
from unidist_bench.collectives import TRAITS, Collective
from unidist_bench.measurement.data import count_wrong, make_call, prepare
from unidist_bench.measurement.interface import MeasuredCall, Side
from unidist_bench.measurement.order import MeasurementOrder
from unidist_bench.measurement.ours import CommunicatorSide, NamedSide
from unidist_bench.results import NAMED, OURS, Results, Row, Series
from unidist_bench.statistics import Figures
from unidist_bench.turns import BenchmarkRanks, Durations, take_turns
from unidist_launch.display import machine

MARK = "unidist-bench "
"""Lines that rank 0 prints for the command begin with this; others are a library's."""
_GIB = 1 << 30


class RefusedError(Exception):
    """The requested measurement is impossible here. Raised on every rank at the same point."""


def main() -> None:
    """Carry out the order of the command line."""
    order = MeasurementOrder.from_plain(json.loads(sys.argv[1]))
    running = context.init()
    try:
        with ExitStack() as stack:
            for kind, found in _Measurement(running, order, stack).run():
                if running.topology.rank == 0:
                    tell(kind, found)
    except RefusedError as exc:
        if running.topology.rank == 0:
            tell("refused", {"text": str(exc)})
    finally:
        context.shutdown()


def tell(kind: str, found: dict[str, Any]) -> None:
    """Print a line for the command.

    Args:
        kind: "head" (`Results` without series), "series" (`Series` without rows), "row" (`Row`), "refused" (a text that
            says why nothing is measured) or "end".
        found: plain data.
    """
    print(f"{MARK}{json.dumps({'kind': kind, **found})}", flush=True)


class _Measurement:
    """One rank's part; everything here is done by all ranks in the same order.

    Args:
        running: the runtime.
        order: what to measure.
        stack: closes what was opened.
    """

    def __init__(self, running: Context, order: MeasurementOrder, stack: ExitStack) -> None:
        self._running = running
        self._order = order
        self._stack = stack
        self._rank, self._size = running.topology.rank, running.topology.world_size
        self._comm = running.duplicate_world()  # not one of those that are measured
        stack.callback(self._comm.close)
        self._meeting = BenchmarkRanks(lambda: self._comm.barrier().wait(), self._all_durations)
        self._beside: dict[str, str] = {}
        self._sides: dict[str, Side] = {}
        self._areas: dict[str, list[Buffer]] = {}

    def run(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Measure; yields what is to be told, on every rank.

        Raises:
            RefusedError: it cannot be measured.
        """
        if self._size < 2:
            raise RefusedError("one rank exchanges nothing; give -np 2 or more")
        if not 0 <= self._order.root < self._size:
            raise RefusedError(f"--root {self._order.root} is no rank; choices: 0 to {self._size - 1}")
        measured = self._running.duplicate_world()
        memory = self._order.memory or ("engine" if measured.capabilities.engine_memory else "ordinary")
        if memory == "engine" and not measured.capabilities.engine_memory:
            measured.close()
            raise RefusedError(f"{measured.description} has no engine memory; give --memory ordinary, or leave it out")
        self._open(measured)
        self._allocate(measured, memory)
        self._try()
        hosts = gather_objects(self._comm, socket.gethostname())
        date = datetime.now(UTC).isoformat(timespec="seconds")
        results = Results(unidist.__version__, date, measured.description, memory, tuple(hosts), self._beside)
        yield "head", asdict(results)
        for collective in self._order.collectives:
            yield from self._series(collective)
        yield "end", {}

    def _open(self, measured: Communicator) -> None:
        """Make the sides."""
        self._sides[OURS] = CommunicatorSide(measured)
        self._stack.callback(self._sides[OURS].close)
        if self._order.named:
            self._sides[NAMED] = NamedSide(self._running.negotiator)
        for name in self._order.beside:
            make: Callable[[], Side] = self._agreed(f"--beside {name}", partial(self._imported, name))
            side: Side = self._agreed(f"--beside {name}", make)
            self._sides[name] = side
            self._stack.callback(side.close)

    def _imported(self, name: str) -> Callable[[], Side]:
        """Import a peer, and return what connects it."""
        if name == "gloo":
            from unidist_bench.measurement import _torch_gloo

            self._beside[name] = _torch_gloo.VERSION
            address = os.environ.get("UNIDIST_HOST_ADDRESS", "127.0.0.1")
            return lambda: _torch_gloo.GlooSide(self._comm, address)
        from unidist_bench.measurement import _mpi

        self._beside[name] = _mpi.VERSION
        return lambda: _mpi.MpiSide(self._comm)

    def _allocate(self, measured: Communicator, memory: str) -> None:
        """Allocate the buffers; peers use those of ours, unless they are engine memory.

        Raises:
            RefusedError: they do not fit into memory.
        """
        num_areas, most = self._order.areas(self._size)
        apart = memory == "engine" and bool(self._order.beside)
        self._agreed("the buffers", lambda: self._check_memory(num_areas * most * (2 if apart else 1)))

        def ordinary() -> list[Buffer]:
            return [Buffer.allocate(most, DType.UINT8) for _ in range(num_areas)]

        def engine() -> list[Buffer]:
            return [measured.allocate(most) for _ in range(num_areas)]

        ours = self._agreed("the buffers", engine if memory == "engine" else ordinary)
        theirs = self._agreed("the buffers", ordinary) if apart else ours
        self._areas = {name: ours if name in (OURS, NAMED) else theirs for name in self._sides}

    def _check_memory(self, needed: int) -> None:
        _, available = machine.memory_bytes()
        available = min(available, machine.container_memory_bytes() or available)
        local_size = self._running.topology.local_size
        if needed * local_size > available:
            raise ConfigurationError(
                f"{local_size} ranks on {socket.gethostname()} need {needed * local_size / _GIB:.3g} GiB, and "
                f"{available / _GIB:.3g} GiB are available; lower --max-bytes"
            )

    def _try(self) -> None:
        """Run the smallest call of every collective once on each side.

        Raises:
            RefusedError: a side cannot; says which, and why.
        """
        for collective in self._order.collectives:
            for name in self._names(collective):
                call = self._call(collective, name, self._order.counts(collective, self._size)[0])
                once = partial(self._once, name, call)
                what = f"{name}: {collective}"
                if TRAITS[collective].has_data:
                    what += f" of {self._order.dtype}"
                if TRAITS[collective].reduces:
                    what += f" with {self._order.op}"
                self._agreed(what, once)

    def _once(self, name: str, call: MeasuredCall) -> None:
        self._sides[name].operation(call)()

    def _series(self, collective: Collective) -> Iterator[tuple[str, dict[str, Any]]]:
        traits = TRAITS[collective]
        dtype = str(self._order.dtype) if traits.has_data else ""
        op = str(self._order.op) if traits.reduces else ""
        yield "series", asdict(Series(collective, dtype, op, self._order.works_in_place(collective)))
        for count in self._order.counts(collective, self._size):
            yield "row", asdict(self._row(collective, count))

    def _row(self, collective: Collective, count: int) -> Row:
        num_bytes = count * self._order.dtype.itemsize
        iterations, inner = self._order.repetitions(num_bytes)
        calls = {name: self._call(collective, name, count) for name in self._names(collective)}
        runs = {name: self._sides[name].operation(call) for name, call in calls.items()}
        wrong = {name: self._count_wrong(call, runs[name]) for name, call in calls.items()}
        found = take_turns(runs, self._meeting, repetitions=iterations, warmup=self._order.warmup, inner=inner)
        part = 0.5 if collective is Collective.SENDRECV else 1.0  # a message and its answer
        figures = {
            name: Figures.of([seconds * part for seconds in durations], wrong=wrong[name])
            for name, durations in found.items()
        }
        return Row(num_bytes, count, figures)

    def _count_wrong(self, call: MeasuredCall, run: Callable[[], object]) -> int | None:
        """Return the wrong elements of all ranks after one call; None: not checked."""
        if not self._order.check or not TRAITS[call.collective].has_data:
            return None
        prepare(call)
        self._meeting.barrier()
        run()
        everyone: list[int] = gather_objects(self._comm, count_wrong(call))
        return sum(everyone)

    def _names(self, collective: Collective) -> list[str]:
        return [name for name in self._sides if name != NAMED or TRAITS[collective].can_be_named]

    def _call(self, collective: Collective, side: str, count: int) -> MeasuredCall:
        return make_call(
            collective,
            self._areas[side],
            count,
            dtype=self._order.dtype,
            op=self._order.op,
            root=self._order.root,
            rank=self._rank,
            size=self._size,
            in_place=self._order.works_in_place(collective),
        )

    def _agreed(self, what: str, attempt: Callable[[], Any]) -> Any:
        """Return what an attempt of this rank returns, if it succeeds on every rank.

        Raises:
            RefusedError: it failed on one; the same on every rank.
        """
        result, problem = None, None
        try:
            result = attempt()
        except PeerLostError:
            raise
        except Exception as exc:  # whatever a library raises that cannot do it
            text = str(exc).strip().partition("\n")[0]
            problem = f"{what}: {text or type(exc).__name__}"
        problems = gather_objects(self._comm, problem)
        for rank, found in enumerate(problems):
            if found is not None:
                raise RefusedError(found if len(set(problems)) == 1 else f"{found} (rank {rank})")
        return result

    def _all_durations(self, own: Durations) -> list[Durations]:
        found: list[Durations] = gather_objects(self._comm, own)
        return found


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher says that it was interrupted; tracebacks add nothing
    run_program(main)
