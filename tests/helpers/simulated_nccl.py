"""A group of NCCL on simulated devices: each operation runs on the group's own stream.

As `ProcessGroupNCCL` orders it: the group's stream waits for the current one when an operation is posted, `Work.wait`
makes the current stream wait for the operation, and until then the work keeps the tensors. A message is an operation of
two ranks, which holds up the streams of both until the other one has come to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from simulated_device import Entry, Event, Item, Machine, Mark, Meeting, Place, Stream

_REDUCTIONS: list[tuple[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = [
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.AVG, torch.add),
    (dist.ReduceOp.PRODUCT, torch.mul),
    (dist.ReduceOp.MIN, torch.minimum),
    (dist.ReduceOp.MAX, torch.maximum),
]

_identifiers = itertools.count()


class Work:
    """See the module.

    Args:
        machine: has the devices.
        mark: behind the operation.
        tensors: that the operation uses.
    """

    def __init__(self, machine: Machine, mark: Mark, tensors: Any) -> None:
        self._machine = machine
        self._mark = mark
        self._tensors = tensors

    def wait(self, *limit: Any) -> None:
        """Make the current stream wait."""
        event = Event()
        event.mark = self._mark
        self._machine.current_stream(self._mark.stream.index).wait_event(event)
        self._tensors = None

    def is_completed(self) -> bool:
        """Return whether the operation is complete; it goes on, as on a device."""
        return self._machine.has_finished(self._mark)


class SimulatedOptions:
    """Stands for `torch.distributed.ProcessGroupNCCL.Options`."""

    split_from: Any = None
    split_color = -2

    def __init__(self) -> None:
        self.config = SimpleNamespace(split_share=None)


class SimulatedNccl:
    """Stands for `torch.distributed.ProcessGroupNCCL`.

    Args:
        store: by which the ranks learn which group it is.
        rank: of this thread.
        size: number of ranks.
        options: say from which group it is split, if from any.
    """

    Options = SimulatedOptions
    machine: Machine
    groups: dict[str, dict[Any, Any]]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._rank, self._size, self._options = rank, size, options
        self._name, self._store = "", store
        self._numbers, self._splits = itertools.count(), itertools.count()
        self._messages: dict[tuple[int, int], int] = {}
        self._num_alltoalls = 0
        self._stream: Stream | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Make the group's stream."""
        parent = getattr(self._options, "split_from", None)  # PyTorch itself gives no options
        if parent is not None:
            self._name = parent._divide(self._options.split_color)
        else:
            if self._rank == 0:
                self._store.set("identifier", f"group {next(_identifiers)}")
            self._name = self._store.get("identifier").decode()
        self._stream = Stream(device)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Divide the group, and be in no part."""
        self._divide(None)

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Work:
        """See `ProcessGroup`."""
        op = dist.ReduceOp.SUM if options is None else options.reduceOp

        def run(given: dict[int, list[torch.Tensor]]) -> None:
            total = _reduced([given[rank][0] for rank in sorted(given)], op)
            for listed in given.values():
                listed[0].copy_(total)

        return self._post("allreduce", run, [tensors[0]])

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor) -> Work:
        def run(given: dict[int, list[torch.Tensor]]) -> None:
            whole = torch.cat([given[rank][1] for rank in sorted(given)])
            for listed in given.values():
                listed[0].copy_(whole)

        return self._post("allgather", run, [output, own])

    def allgather(self, outputs: Sequence[Sequence[torch.Tensor]], own: Sequence[torch.Tensor]) -> Work:
        """See `ProcessGroup`."""

        def run(given: dict[int, list[torch.Tensor]]) -> None:
            pieces = [given[rank][0].clone() for rank in sorted(given)]
            for listed in given.values():
                for target, piece in zip(listed[1:], pieces, strict=True):
                    target.copy_(piece)

        return self._post("allgather", run, [own[0], *outputs[0]])

    def _reduce_scatter_base(self, output: torch.Tensor, whole: torch.Tensor, options: Any) -> Work:
        def run(given: dict[int, list[torch.Tensor]]) -> None:
            total = _reduced([given[rank][1] for rank in sorted(given)], options.reduceOp)
            for rank, piece in zip(sorted(given), total.chunk(self._size), strict=True):
                given[rank][0].copy_(piece)

        return self._post("reducescatter", run, [output, whole])

    def reduce(self, tensors: Sequence[torch.Tensor], options: Any) -> Work:
        """See `ProcessGroup`."""

        def run(given: dict[int, list[torch.Tensor]]) -> None:
            total = _reduced([given[rank][0] for rank in sorted(given)], options.reduceOp)
            given[options.rootRank][0].copy_(total)

        return self._post("reduce", run, [tensors[0]])

    def alltoall_base(
        self, output: torch.Tensor, own: torch.Tensor, received: list[int], sent: list[int], options: Any
    ) -> Work:
        """See `ProcessGroup`."""
        counts = self.groups.setdefault(f"{self._name} counts", {})
        number = self._num_alltoalls = self._num_alltoalls + 1
        counts[number, self._rank] = sent

        def run(given: dict[int, list[torch.Tensor]]) -> None:
            pieces = {rank: given[rank][1].split(counts[number, rank]) for rank in given}
            for rank, listed in given.items():
                listed[0].copy_(torch.cat([pieces[source][rank] for source in sorted(given)]))

        return self._post("alltoall", run, [output, own])

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> Work:
        """See `ProcessGroup`."""

        def run(given: dict[int, list[torch.Tensor]]) -> None:
            for rank, listed in given.items():
                if rank != options.rootRank:
                    listed[0].copy_(given[options.rootRank][0])

        return self._post("broadcast", run, [tensors[0]])

    def send(self, tensors: Sequence[torch.Tensor], to: int, tag: int) -> Work:
        """See `ProcessGroup`; it ends when its receiver takes it, and holds up what is posted after it."""
        return self._post_message("send", (self._rank, to), tensors[0])

    def recv(self, tensors: Sequence[torch.Tensor], source: int, tag: int) -> Work:
        """See `ProcessGroup`."""
        return self._post_message("recv", (source, self._rank), tensors[0])

    def abort(self) -> None:
        """Nothing is left to do."""

    def shutdown(self) -> None:
        """Nothing is left to do."""

    def _post_message(self, name: str, route: tuple[int, int], tensor: torch.Tensor) -> Work:
        def run(given: dict[int, list[torch.Tensor]]) -> None:
            (sent,), (received,) = given[route[0]], given[route[1]]
            assert sent.nbytes == received.nbytes, "a message has the size of the tensor that receives it"
            received.copy_(sent)

        count = self._messages[route] = self._messages.get(route, 0) + 1
        return self._post(name, run, [tensor], key=(*route, count), size=2)

    def _post(
        self,
        name: str,
        run: Callable[[dict[int, list[torch.Tensor]]], None],
        tensors: Any,
        *,
        key: Any = None,
        size: int | None = None,
    ) -> Work:
        machine, stream = self.machine, self._stream
        assert stream is not None, "connected when it was made"
        stream.wait_stream(machine.current_stream(stream.index))
        places = [machine.place(each) for each in tensors]
        kind = "collective" if key is None else "message"
        key = next(self._numbers) if key is None else key
        with machine.changed:
            machine.log.append(Entry(kind, name, stream.index))
            meetings = self.groups.setdefault(self._name, {})
            meeting = meetings.get(key)
            if meeting is None:
                meeting = meetings[key] = Meeting(size or self._size, lambda given: run(_tensors(given)))
            meeting.streams[self._rank] = stream
            meeting.brought[self._rank] = places
            stream.put(Item(meeting=meeting))
        return Work(machine, stream.record(), tensors)

    def _divide(self, color: int | None) -> str:
        """Meet the other ranks of this group, of which each divides it now, and return the name of a part."""
        assert self._stream is not None
        assert not any(item.meeting for item in self._stream.queue), "an operation of the group is under way"
        number = next(self._splits)
        with self.machine.changed:
            colors = self.groups.setdefault(f"{self._name}/{number}", {})
            colors[self._rank] = color
            self.machine.changed.notify_all()
            if not self.machine.changed.wait_for(lambda: len(colors) == self._size, 30):
                raise RuntimeError(f"ranks {sorted(colors)} of {self._size} divide a group")
        return f"{self._name}/{number}.{color}"


def _tensors(given: dict[int, list[Place]]) -> dict[int, list[torch.Tensor]]:
    return {rank: [place.tensor() for place in places] for rank, places in given.items()}


def _reduced(values: Sequence[torch.Tensor], op: Any) -> torch.Tensor:
    if op == dist.ReduceOp.AVG:
        values = [each * (1 / len(values)) for each in values]  # before the sum, as NCCL does
    join = next(function for known, function in _REDUCTIONS if op == known)
    total = values[0].clone()
    for each in values[1:]:
        total = join(total, each)
    return total
