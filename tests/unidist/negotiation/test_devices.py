"""Named operations on device memory, for which host memory with another name stands here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from typing_extensions import override

from unidist.algorithms import adasum_allreduce
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator
from unidist.errors import ConfigurationError, MismatchError, PeerLostError
from unidist.negotiation import (
    CommunicatorRendezvous,
    DeviceConnector,
    DeviceOrder,
    NegotiationOptions,
    Negotiator,
    OperationKind,
    Request,
    RunsOnDevice,
)
from unidist.testing import ThreadWorld

Array = npt.NDArray[np.float32]


def plain(buffer: Buffer) -> Buffer:
    assert buffer.memory.startswith("gpu:"), "host memory came to the device"
    return replace(buffer, memory=HOST)


class Device(RunsOnDevice):
    """A communicator for memory "gpu:N", whose N differs between ranks."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.calls: list[str] = []
        self.is_queueing = False
        self.size, self.rank = inner.size, inner.rank
        self.is_closed = False

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.inner, name)

        def call(*buffers: Buffer, **arguments: Any) -> Any:
            assert self.is_queueing
            self.calls.append(name)
            return operation(*map(plain, buffers), **arguments)

        return call

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        self.is_queueing = True
        yield
        self.is_queueing = False

    @override
    def allocate_on_device(self, count: int, dtype: DType) -> Buffer:
        assert self.is_queueing
        return replace(Buffer.allocate(count, dtype), memory=f"gpu:{self.rank}")

    @override
    def copy_on_device(self, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> None:
        assert self.is_queueing
        self.calls.append("copy")
        for source, target in zip(sources, targets, strict=True):
            plain(target).bytes()[:] = plain(source).bytes()

    @override
    def adasum_on_device(self, source: Buffer, target: Buffer, *, scale: float) -> None:
        assert self.is_queueing
        self.calls.append("adasum")
        adasum_allreduce(self.inner, plain(source), plain(target), scale=scale)

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()


class Order(DeviceOrder):
    def __init__(self, device: Callable[[], Device], name: str) -> None:
        self.device = device
        self.name = name

    @override
    def begin(self) -> None:
        assert self.device().is_queueing
        self.device().calls.append(f"begin {self.name}")

    @override
    def end(self) -> None:
        assert self.device().is_queueing
        self.device().calls.append(f"end {self.name}")


class Connector(DeviceConnector):
    def __init__(self) -> None:
        self.devices: list[Device] = []

    @override
    def moves(self, kind: str) -> bool:
        return kind == "gpu"

    @override
    def connect(self, kind: str, host: Communicator) -> Any:
        twin = host.split(range(host.size))
        assert twin is not None
        self.devices.append(Device(twin))
        return self.devices[-1]


def on_gpu(array: Array, rank: int) -> Buffer:
    return replace(Buffer.of(array), memory=f"gpu:{rank}")


def summed(name: str, array: Array, rank: int, *, host: bool = False) -> Request:
    memory = Buffer.of(array) if host else on_gpu(array, rank)
    return Request(name, OperationKind.ALLREDUCE, memory, memory, array.shape)


def negotiator(communicator: Communicator, connector: DeviceConnector | None) -> Negotiator:
    return Negotiator(communicator, NegotiationOptions(devices=connector))


def test_small_ones_are_fused_on_the_device_and_others_run_there() -> None:
    def main(communicator: Communicator) -> list[str]:
        rank, connector = communicator.rank, Connector()
        names = negotiator(communicator, connector)
        assert names.moves("gpu")
        assert names.moves(HOST)
        assert not names.moves("tpu")
        arrays = [np.full(n, rank + n, np.float32) for n in (3, 5, 2)]
        on_host = np.full(4, rank, np.float32)
        handles = [names.submit(summed(f"a{i}", array, rank)) for i, array in enumerate(arrays)]
        handles.append(names.submit(summed("host", on_host, rank, host=True)))
        for handle in handles:
            handle.wait()
        for array in arrays:
            np.testing.assert_array_equal(array, np.full(len(array), 3 + 3 * len(array), np.float32))
        np.testing.assert_array_equal(on_host, np.full(4, 3, np.float32))
        gathered = np.zeros((3 + 0, 2), np.float32)
        own = np.full((rank, 2), rank, np.float32)
        request = Request(
            "gather",
            OperationKind.ALLGATHER,
            on_gpu(own, rank) if rank else Buffer(0, 0, DType.FLOAT32, None, "gpu:0"),
            shape=own.shape,
            allocate_output=lambda rows: on_gpu(gathered, rank),
        )
        handle = names.submit(request)
        handle.wait()
        assert handle.rows == (0, 1, 2)
        np.testing.assert_array_equal(gathered, np.array([[1, 1], [2, 2], [2, 2]], np.float32))
        root = np.full(2, rank, np.float32)
        names.submit(Request("root", OperationKind.BROADCAST, target=on_gpu(root, rank), shape=(2,), root=2)).wait()
        np.testing.assert_array_equal(root, np.full(2, 2, np.float32))
        names.close()
        assert len(connector.devices) == 1
        return connector.devices[0].calls

    with ThreadWorld(3) as world:
        for calls in world.run(main):
            assert calls == ["copy", "allreduce", "copy", "allgather", "broadcast"]


def test_operations_are_ordered_with_their_submitters_and_devices_are_closed() -> None:
    def main(communicator: Communicator) -> list[str]:
        rank, connector = communicator.rank, Connector()
        names = negotiator(communicator, connector)
        for listed in (["alone"], ["a", "b"]):
            requests = [summed(name, np.ones(2, np.float32), rank) for name in listed]
            for request in requests:
                request.order = Order(lambda: connector.devices[0], request.name)
            for handle in [names.submit(request) for request in requests]:
                handle.wait()
        vector = np.array([rank, 1 - rank], np.float32)
        memory = on_gpu(vector, rank)
        names.submit(Request("adasum", OperationKind.ADASUM, memory, memory, vector.shape)).wait()
        np.testing.assert_array_equal(vector, np.ones(2, np.float32))
        names.close()
        assert connector.devices[0].is_closed
        return connector.devices[0].calls

    with ThreadWorld(2) as world:
        for calls in world.run(main):
            assert calls == [
                *("begin alone", "allreduce", "end alone"),
                *("begin a", "begin b", "copy", "allreduce", "copy", "end a", "end b"),
                "adasum",
            ]


def test_device_and_host_memory_of_one_name_do_not_match() -> None:
    def main(communicator: Communicator) -> None:
        names = negotiator(communicator, Connector())
        array = np.ones(3, np.float32)
        with pytest.raises(MismatchError, match="gpu"):
            names.submit(summed("a", array, communicator.rank, host=communicator.rank == 1)).wait()
        names.close()

    with ThreadWorld(2) as world:
        world.run(main)


def test_a_rank_that_has_joined_takes_part_with_zeros_of_its_device() -> None:
    def main(communicator: Communicator) -> list[str]:
        rank, connector = communicator.rank, Connector()
        names = negotiator(communicator, connector)
        if rank == 0:
            array = np.full(3, 7, np.float32)
            names.submit(summed("a", array, rank)).wait()
            np.testing.assert_array_equal(array, np.full(3, 7, np.float32))
        names.join(lambda name: None)
        names.close()
        return connector.devices[0].calls

    with ThreadWorld(2) as world:
        assert world.run(main) == [["allreduce"], ["allreduce"]]


def test_a_device_that_cannot_be_connected_ends_the_operations_of_all_ranks() -> None:
    class Broken(Connector):
        @override
        def connect(self, kind: str, host: Communicator) -> Any:
            if host.rank == 1:
                raise ConfigurationError("ranks 0, 1 use GPU a")
            return super().connect(kind, host)

    def main(communicator: Communicator) -> None:
        names = negotiator(communicator, Broken())
        array = np.ones(3, np.float32)
        with pytest.raises((ConfigurationError, PeerLostError), match=r"use GPU a|abort"):
            names.submit(summed("a", array, communicator.rank)).wait()
        names.close()

    with ThreadWorld(2) as world:
        world.run(main)


def test_ranks_meet_over_a_communicator() -> None:
    def main(communicator: Communicator) -> list[bytes]:
        meeting = CommunicatorRendezvous(communicator, address="10.0.0.7", secret=b"s")
        first = meeting.allgather(b"x" * communicator.rank, timeout=timedelta(seconds=20))
        second = meeting.allgather(b"", timeout=timedelta(seconds=20))
        assert [each.payload for each in second] == [b""] * 3
        return [each.payload for each in first]

    with ThreadWorld(3) as world:
        assert world.run(main) == [[b"", b"x", b"xx"]] * 3
