"""`--allreduce-algorithm`: one of ours in front of an engine."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from unidist.algorithms import ALGORITHMS, AlgorithmCommunicator
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator, MessageOrder, ReduceOp
from unidist.errors import ConfigurationError, PeerLostError, StalledError, UsageError
from unidist.testing.recording import RecordingCommunicator
from unidist.testing.threads import ThreadCommunicator, ThreadWorld


@pytest.mark.parametrize("name", ALGORITHMS)
def test_allreduce_goes_over_messages_and_leaves_the_source_alone(name: str) -> None:
    def main(communicator: Communicator) -> None:
        recorder = RecordingCommunicator(communicator)
        selected = AlgorithmCommunicator(recorder, name)
        source, target = np.full(10, communicator.rank, np.int64), np.zeros(10, np.int64)
        selected.allreduce(Buffer.of(source), Buffer.of(target), op=ReduceOp.MAX).wait()
        assert target.tolist() == [2] * 10
        assert source.tolist() == [communicator.rank] * 10
        assert recorder.count("send") > 0
        assert recorder.count("allreduce") == 0

    with ThreadWorld(3) as world:
        world.run(main)


def test_everything_else_is_the_engines_own() -> None:
    def main(communicator: Communicator) -> None:
        recorder = RecordingCommunicator(communicator)
        selected = AlgorithmCommunicator(recorder, "ring")
        one, two = Buffer.allocate(2, DType.INT8), Buffer.allocate(4, DType.INT8)
        selected.allgather(one, two).wait()
        selected.broadcast(one, root=1).wait()
        selected.reducescatter(two, one).wait()
        selected.alltoall(two, Buffer.allocate(4, DType.INT8), send_counts=[2, 2], receive_counts=[2, 2]).wait()
        selected.barrier().wait()
        selected.send(one, to=communicator.rank).wait()
        selected.recv(one, source=communicator.rank).wait()
        assert selected.allocate(100).nbytes == 100
        assert [record.operation for record in recorder.records] == [
            "allgather", "broadcast", "reducescatter", "alltoall", "barrier", "send", "recv",
        ]  # fmt: skip

    with ThreadWorld(2) as world:
        world.run(main)


def test_parts_use_the_same_algorithm() -> None:
    def main(communicator: Communicator) -> None:
        recorder = RecordingCommunicator(communicator)
        selected = AlgorithmCommunicator(recorder, "tree")
        part = selected.split([0, 2] if communicator.rank != 1 else [])
        if communicator.rank == 1:
            assert part is None
            return
        assert part is not None
        data = np.ones(3)
        part.allreduce(Buffer.of(data), Buffer.of(data)).wait()
        assert data.tolist() == [2.0] * 3
        assert part.members == (0, 2)
        assert recorder.count("allreduce") == 0

    with ThreadWorld(3) as world:
        world.run(main)


def test_abort_ends_both_kinds_of_operations() -> None:
    def main(communicator: ThreadCommunicator) -> None:
        selected = AlgorithmCommunicator(communicator, "naive")
        all_made.wait()
        selected.abort("over")
        data = Buffer.allocate(1, DType.INT8)
        with pytest.raises(PeerLostError, match="over"):
            selected.allreduce(data, data)
        with pytest.raises(PeerLostError, match="over"):
            selected.recv(data, source=0)
        selected.close()

    all_made = threading.Barrier(2, timeout=30)
    with ThreadWorld(2) as world:
        world.run(main)


def test_a_stalled_allreduce_names_itself_and_aborts_the_engine() -> None:
    def main(communicator: Communicator) -> None:
        selected = AlgorithmCommunicator(communicator, "ring")
        data = Buffer.allocate(4, DType.INT8)
        if communicator.rank == 0:
            with pytest.raises(
                StalledError, match="allreduce of 4 int8 over threads, ranks 0, 1, ring all-reduce: rank 0 got"
            ):
                selected.allreduce(data, data)
        with pytest.raises(PeerLostError, match="allreduce of 4 int8"):
            selected.recv(data, source=1 - communicator.rank).wait(timedelta(seconds=10))

    with ThreadWorld(2, timeout=timedelta(seconds=0.1)) as world:
        world.run(main)


def test_an_engine_without_messages_or_host_memory_is_refused() -> None:
    def main(communicator: Communicator) -> None:
        capabilities = communicator.capabilities
        for lacking in (
            replace(capabilities, messages=MessageOrder.NONE),
            replace(capabilities, memory_kinds=frozenset("cuda")),
        ):
            communicator.capabilities = lacking
            with pytest.raises(ConfigurationError, match="--allreduce-algorithm ring needs an engine that sends"):
                AlgorithmCommunicator(communicator, "ring")

    with ThreadWorld(1) as world:
        world.run(main)


def test_an_unknown_name_lists_the_choices() -> None:
    with ThreadWorld(1) as world, pytest.raises(ConfigurationError, match="Did you mean 'tree'"):
        AlgorithmCommunicator(world.communicators[0], "trees")


def test_device_memory_is_refused_with_the_way_out() -> None:
    with ThreadWorld(1) as world:
        selected = AlgorithmCommunicator(world.communicators[0], "ring")
        assert selected.capabilities.memory_kinds == {HOST}
        data = Buffer(4096, 1, DType.FLOAT32, memory="cuda:0")
        with pytest.raises(UsageError, match="adds up in host memory, but the buffer is in 'cuda:0'"):
            selected.allreduce(data, data)
