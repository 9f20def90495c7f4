"""The recording communicator counts what passes and changes nothing."""

from __future__ import annotations

from unidist.buffer import Buffer, DType
from unidist.communicator import Communicator
from unidist.testing.recording import Record, RecordingCommunicator
from unidist.testing.threads import ThreadWorld


def test_every_operation_is_recorded_with_its_bytes_dtype_and_group() -> None:
    def main(communicator: Communicator) -> list[Record]:
        recorder = RecordingCommunicator(communicator)
        two, four = Buffer.allocate(2, DType.FLOAT32), Buffer.allocate(4, DType.FLOAT32)
        recorder.allreduce(four, four).wait()
        recorder.allgather(two, four).wait()
        recorder.broadcast(two, root=0).wait()
        recorder.reducescatter(four, two).wait()
        recorder.alltoall(four, Buffer.allocate(4, DType.FLOAT32), send_counts=[2, 2], receive_counts=[2, 2]).wait()
        recorder.send(two, to=recorder.rank).wait()
        recorder.recv(two, source=recorder.rank).wait()
        recorder.barrier().wait()
        assert recorder.count("send") == 1
        return recorder.records

    names = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "send", "recv")
    expected = list(zip(names, (16, 8, 8, 16, 16, 8, 8), strict=True))
    with ThreadWorld(2) as world:
        for records in world.run(main):
            assert records[:-1] == [Record(operation, nbytes, DType.FLOAT32, 2) for operation, nbytes in expected]
            assert records[-1] == Record("barrier", 0, None, 2)


def test_results_are_those_of_the_inner_communicator() -> None:
    def main(communicator: Communicator) -> list[int]:
        recorder = RecordingCommunicator(communicator)
        data = Buffer.of(bytearray([communicator.rank + 1]))
        recorder.allreduce(data, data).wait()
        return list(data.bytes())

    with ThreadWorld(3) as world:
        assert world.run(main) == [[6]] * 3


def test_parts_record_into_the_same_list() -> None:
    def main(communicator: Communicator) -> list[Record]:
        recorder = RecordingCommunicator(communicator)
        part = recorder.split([communicator.rank])
        assert part is not None
        part.barrier().wait()
        return recorder.records

    with ThreadWorld(2) as world:
        assert world.run(main)[0] == [Record("barrier", 0, None, 1)]
