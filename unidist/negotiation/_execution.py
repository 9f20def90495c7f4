"""Runs operations that all ranks have agreed on, small all-reduces fused into one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from math import prod

from unidist.algorithms.adasum import adasum_allreduce
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator
from unidist.errors import UsageError
from unidist.negotiation._agreement import Ready
from unidist.negotiation.devices import DeviceConnector, RunsOnDevice
from unidist.negotiation.handle import Handle
from unidist.negotiation.request import OperationKind, Request, reducescatter_rows
from unidist.timeline import Recorder

MAX_FUSED_BYTES = 1 << 20
"""An all-reduce larger than this runs alone: two copies would cost more than a message saves."""

Operation = tuple[Handle, Ready]
_Run = Callable[[Communicator, Handle, Ready], None]


class Execution:
    """Runs agreed operations over a communicator; every rank is given the same ones in the same order.

    Args:
        communicator: carries those on host memory, and what connects others.
        devices: connects the ranks for the memory of devices; None: there is none.
        fusion_threshold_bytes: largest fused all-reduce; 0 fuses nothing.
        recorder: takes events for the timeline.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        fusion_threshold_bytes: int,
        recorder: Recorder,
        devices: DeviceConnector | None = None,
    ) -> None:
        self._communicator = communicator
        self._connector = devices
        self._devices: dict[str, Communicator] = {}
        self._device_buffers: dict[str, Buffer] = {}
        self._fusion_threshold_bytes = fusion_threshold_bytes
        self._recorder = recorder
        self._fusion_buffer = Buffer(0, 0, DType.UINT8)
        self._operations: dict[OperationKind, _Run] = {
            OperationKind.ALLREDUCE: self._allreduce,
            OperationKind.ADASUM: self._adasum,
            OperationKind.ALLGATHER: self._allgather,
            OperationKind.BROADCAST: self._broadcast,
            OperationKind.REDUCESCATTER: self._reducescatter,
            OperationKind.ALLTOALL: self._alltoall,
            OperationKind.BARRIER: self._barrier,
            OperationKind.JOIN: self._join,
        }

    def connect(self, kind: str) -> None:
        """Connect the ranks for a kind of memory, unless they are. Collective over all of them."""
        if kind == HOST or kind in self._devices:
            return
        if self._connector is None or not self._connector.moves(kind):
            raise UsageError(f"named operations on {kind} memory are not possible here; copy the tensors to the host")
        device = self._connector.connect(kind, self._communicator)
        if not isinstance(device, RunsOnDevice):
            raise UsageError(
                f"named operations on {kind} memory: the engine ({device.description}) has none; copy the tensors to "
                "the host, or choose another --engine"
            )
        self._devices[kind] = device

    def allocate(self, kind: str, count: int, dtype: DType) -> Buffer:
        """Return zeros in a kind of memory for which the ranks are connected."""
        if kind == HOST:
            return Buffer.allocate(count, dtype)
        device = self._devices[kind]
        assert isinstance(device, RunsOnDevice)
        with device.queueing():
            return device.allocate_on_device(count, dtype)

    def abort(self, reason: str) -> None:
        """Abort the communicators of devices. From any thread."""
        for device in list(self._devices.values()):
            device.abort(reason)

    def close(self) -> None:
        """Close the communicators of devices. Nothing runs any more."""
        for device in self._devices.values():
            device.close()

    def run(self, operations: Sequence[Operation]) -> Iterator[Sequence[Operation]]:
        """Run all of them, and yield those that are complete, a few at a time."""
        if len(operations) == 1:
            self._run_alone(*operations[0])
            yield operations
            return
        start = 0
        while start < len(operations):
            stop = self._fusable_until(operations, start)
            if stop - start > 1:
                self._run_fused([handle for handle, _ in operations[start:stop]])
            else:
                self._run_alone(*operations[start])
            yield operations[start:stop]
            start = stop

    def _run_alone(self, handle: Handle, agreed: Ready) -> None:
        request, timeline = handle.request, self._recorder.timeline
        memory = request.signature.memory
        start = time.monotonic_ns() if timeline is not None else 0
        if memory == HOST:
            self._operations[request.kind](self._communicator, handle, agreed)
        else:
            device = self._devices[memory]
            assert isinstance(device, RunsOnDevice)
            with device.queueing():
                _begin([request])
                self._operations[request.kind](device, handle, agreed)
                _end([request])
        if timeline is not None:
            name = request.row if self._recorder.per_tensor else request.name
            timeline.record("exchange", request.kind.upper(), start, time.monotonic_ns(), tensor=name)

    # Fusion

    def _fusable_until(self, operations: Sequence[Operation], start: int) -> int:
        """Return the end of the longest run from `start` that fits one fused all-reduce; at least start + 1.

        It depends only on what all ranks agreed on, so all ranks fuse the same operations.
        """
        request = operations[start][0].request
        nbytes = request.source.nbytes
        if request.kind is not OperationKind.ALLREDUCE or nbytes > min(MAX_FUSED_BYTES, self._fusion_threshold_bytes):
            return start + 1
        dtype, op, scale, memory = request.source.dtype, request.op, request.scale, request.signature.memory
        stop = start + 1
        while stop < len(operations):
            other = operations[stop][0].request
            source = other.source
            nbytes += source.nbytes
            if (
                other.kind is not OperationKind.ALLREDUCE
                or source.dtype is not dtype
                or other.op is not op
                or other.scale != scale
                or other.signature.memory != memory
                or source.nbytes > MAX_FUSED_BYTES
                or nbytes > self._fusion_threshold_bytes
            ):
                break
            stop += 1
        return stop

    def _run_fused(self, handles: Sequence[Handle]) -> None:
        first = handles[0].request
        if first.signature.memory != HOST:
            self._run_fused_on_device(handles)
            return
        dtype = first.source.dtype
        fused = self._fusion_memory(sum(handle.request.source.nbytes for handle in handles)).cast(dtype)
        times = [time.monotonic_ns()]
        address = fused.address
        for handle in handles:
            source = handle.request.source
            ctypes.memmove(address, source.address, source.nbytes)
            address += source.nbytes
        times.append(time.monotonic_ns())
        self._communicator.allreduce(fused, fused, op=first.op, scale=first.scale).wait()
        times.append(time.monotonic_ns())
        address = fused.address
        for handle in handles:
            target = handle.request.target
            ctypes.memmove(target.address, address, target.nbytes)
            address += target.nbytes
        times.append(time.monotonic_ns())
        self._record_fused(handles, times)

    def _run_fused_on_device(self, handles: Sequence[Handle]) -> None:
        """Fuse on the device. Its work is queued: the timeline shows when, and not how long it takes."""
        requests = [handle.request for handle in handles]
        first = requests[0]
        device = self._devices[first.signature.memory]
        assert isinstance(device, RunsOnDevice)
        with device.queueing():
            kind, count = first.signature.memory, sum(request.source.count for request in requests)
            kept = self._device_buffers.get(kind)
            nbytes = count * first.source.dtype.itemsize
            if kept is None or kept.count < nbytes:
                kept = device.allocate_on_device(1 << max(16, (nbytes - 1).bit_length()), DType.UINT8)
                self._device_buffers[kind] = kept
            fused = kept.slice(0, nbytes).cast(first.source.dtype)
            places, start = [], 0
            for request in requests:
                places.append(fused.slice(start, request.source.count))
                start += request.source.count
            times = [time.monotonic_ns()]
            _begin(requests)
            device.copy_on_device([request.source for request in requests], places)
            times.append(time.monotonic_ns())
            device.allreduce(fused, fused, op=first.op, scale=first.scale).wait()
            times.append(time.monotonic_ns())
            device.copy_on_device(places, [request.target for request in requests])
            _end(requests)
            times.append(time.monotonic_ns())
        self._record_fused(handles, times)

    def _record_fused(self, handles: Sequence[Handle], times: Sequence[int]) -> None:
        first = handles[0].request
        timeline = self._recorder.timeline
        if timeline is not None and not self._recorder.per_tensor:
            others = f" and {len(handles) - 1} more" if len(handles) > 1 else ""
            timeline.record("exchange", "ALLREDUCE", times[0], times[-1], tensor=first.name + others)
        elif timeline is not None:
            for handle in handles:
                for index, event in enumerate(("MEMCPY_IN_FUSION_BUFFER", "ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER")):
                    timeline.record("exchange", event, times[index], times[index + 1], tensor=handle.request.row)

    def _fusion_memory(self, nbytes: int) -> Buffer:
        """Return `nbytes` of the fusion buffer, which is kept and grows by doubling."""
        if self._fusion_buffer.count < nbytes:
            self._fusion_buffer = self._communicator.allocate(1 << max(16, (nbytes - 1).bit_length()))
        return self._fusion_buffer.slice(0, nbytes)

    # One method for each kind, given the communicator for the request's memory. Rows are those of dim 0; counts are
    # elements.

    def _allreduce(self, over: Communicator, handle: Handle, agreed: Ready) -> None:
        request = handle.request
        over.allreduce(request.source, request.target, op=request.op, scale=request.scale).wait()

    def _adasum(self, over: Communicator, handle: Handle, agreed: Ready) -> None:
        request = handle.request
        if isinstance(over, RunsOnDevice):
            over.adasum_on_device(request.source, request.target, scale=request.scale)
        else:
            adasum_allreduce(over, request.source, request.target, scale=request.scale)

    def _join(self, over: Communicator, handle: Handle, agreed: Ready) -> None:
        handle.succeed(handle.request.target, (agreed.last_joined,))

    def _broadcast(self, over: Communicator, handle: Handle, agreed: Ready) -> None:
        over.broadcast(handle.request.target, root=handle.request.root).wait()

    def _barrier(self, over: Communicator, handle: Handle, agreed: Ready) -> None:
        over.barrier().wait()

    def _reducescatter(self, over: Communicator, handle: Handle, agreed: Ready) -> None:
        request = handle.request
        row = prod(request.shape[1:])
        counts = [rows * row for rows in reducescatter_rows(request.shape[0], over.size)]
        over.reducescatter(
            request.source, request.target, op=request.op, scale=request.scale, counts=_uneven(counts)
        ).wait()

    def _allgather(self, over: Communicator, handle: Handle, agreed: Ready) -> None:
        request = handle.request
        rows = tuple(signature.shape[0] for signature in agreed.signatures)
        row = prod(request.shape[1:])
        output = self._output(handle, rows, row)
        counts = [each * row for each in rows]
        over.allgather(request.source, output, counts=_uneven(counts)).wait()
        handle.succeed(output, rows)

    def _alltoall(self, over: Communicator, handle: Handle, agreed: Ready) -> None:
        request = handle.request
        rows = tuple(signature.splits[over.rank] for signature in agreed.signatures)
        row = prod(request.shape[1:])
        output = self._output(handle, rows, row)
        over.alltoall(
            request.source,
            output,
            send_counts=[each * row for each in request.splits],
            receive_counts=[each * row for each in rows],
        ).wait()
        handle.succeed(output, rows)

    @staticmethod
    def _output(handle: Handle, rows: tuple[int, ...], row: int) -> Buffer:
        allocate = handle.request.allocate_output
        assert allocate is not None, "Request.check demands it"
        output = allocate(rows)
        if output.count != sum(rows) * row or output.dtype is not handle.request.source.dtype:
            raise handle.request.error(
                f"allocate_output({rows}) returned {output.count} {output.dtype} elements, "
                f"but {sum(rows) * row} {handle.request.source.dtype} are needed"
            )
        return output


def _uneven(counts: Sequence[int]) -> Sequence[int] | None:
    """Return the counts, or None if they are all equal, which engines may handle faster."""
    return None if counts.count(counts[0]) == len(counts) else counts


def _begin(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.order is not None:
            request.order.begin()


def _end(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.order is not None:
            request.order.end()
