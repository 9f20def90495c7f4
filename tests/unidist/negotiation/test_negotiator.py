"""Named operations on threads: order, fusion, errors, and what goes over the wire."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

from unidist.buffer import Buffer
from unidist.communicator import Communicator, ReduceOp, Work
from unidist.errors import DuplicateNameError, MismatchError, PeerLostError, StalledError, UsageError
from unidist.negotiation import NegotiationOptions, Negotiator, OperationKind, Request, reducescatter_rows
from unidist.negotiation._wire import BLOCK_BYTES
from unidist.testing.recording import RecordingCommunicator
from unidist.testing.threads import ThreadWorld
from unidist.timeline import Recorder

SECONDS = timedelta(seconds=1)


def allreduce(name: str, data: np.ndarray, **options: Any) -> Request:
    buffer = Buffer.of(data)
    return Request(name, OperationKind.ALLREDUCE, buffer, buffer, data.shape, **options)


def run(
    size: int, main: Callable[[Negotiator], Any], *, timeout: timedelta = 20 * SECONDS, **options: Any
) -> list[Any]:
    """Run `main` on a negotiator per rank; each is closed when all have returned."""
    arrived = threading.Barrier(size, timeout=30)

    def with_negotiator(communicator: Communicator) -> Any:
        negotiator = Negotiator(communicator, NegotiationOptions(**options))
        try:
            result = main(negotiator)
            arrived.wait()  # nobody closes while a peer is still in an operation
            return result
        except BaseException:
            arrived.abort()
            raise
        finally:
            negotiator.close()

    with ThreadWorld(size, timeout=timeout) as world:
        return world.run(with_negotiator)


def test_every_kind_gives_its_result() -> None:
    def main(negotiator: Negotiator) -> None:
        rank, size = negotiator.rank, negotiator.size
        outputs: dict[str, np.ndarray] = {}

        def allocate(name: str) -> Callable[[tuple[int, ...]], Buffer]:
            def make(rows: tuple[int, ...]) -> Buffer:
                outputs[name] = np.zeros((sum(rows), 2), np.int32)
                return Buffer.of(outputs[name])

            return make

        reduced = np.full(3, rank, np.int32)
        gathered = np.full((rank, 2), rank, np.int32)
        copied = np.full(2, rank, np.float32)
        scattered = np.arange(10, dtype=np.float64).reshape(5, 2)
        piece = np.zeros((reducescatter_rows(5, size)[rank], 2))
        exchanged = np.arange(2 * size, dtype=np.int32).reshape(size, 2) + 100 * rank
        handles = [
            negotiator.submit(allreduce("reduced", reduced)),
            negotiator.submit(
                Request(
                    "gathered", OperationKind.ALLGATHER, Buffer.of(gathered), shape=gathered.shape,
                    allocate_output=allocate("gathered"),
                )
            ),
            negotiator.submit(
                Request("copied", OperationKind.BROADCAST, target=Buffer.of(copied), shape=copied.shape, root=1)
            ),
            negotiator.submit(
                Request(
                    "scattered", OperationKind.REDUCESCATTER, Buffer.of(scattered), Buffer.of(piece), scattered.shape,
                    scale=0.5,
                )
            ),
            negotiator.submit(
                Request(
                    "exchanged", OperationKind.ALLTOALL, Buffer.of(exchanged), shape=exchanged.shape,
                    splits=(1,) * size, allocate_output=allocate("exchanged"),
                )
            ),
            negotiator.submit(Request("met", OperationKind.BARRIER)),
        ]  # fmt: skip
        for handle in handles:
            handle.wait()
        assert reduced.tolist() == [3, 3, 3]
        assert outputs["gathered"][:, 0].tolist() == [1, 2, 2]
        assert handles[1].rows == (0, 1, 2)
        assert handles[1].result.count == 6
        assert copied.tolist() == [1, 1]
        first = sum(reducescatter_rows(5, size)[:rank])
        np.testing.assert_array_equal(piece, 1.5 * np.arange(10.0).reshape(5, 2)[first : first + len(piece)])
        assert outputs["exchanged"].tolist() == [[100 * r + 2 * rank, 100 * r + 2 * rank + 1] for r in range(size)]

    run(3, main)


def test_an_allgather_may_change_its_rows_on_one_rank_only() -> None:
    def main(negotiator: Negotiator) -> None:
        for rows in (2, 2, 5, 0):
            own = rows if negotiator.rank == 1 else 1
            outputs: list[np.ndarray] = []

            def allocate(all_rows: tuple[int, ...], outputs: list[np.ndarray] = outputs) -> Buffer:
                outputs.append(np.zeros(sum(all_rows), np.int64))
                return Buffer.of(outputs[0])

            data = np.full(own, negotiator.rank)
            request = Request("x", OperationKind.ALLGATHER, Buffer.of(data), shape=(own,), allocate_output=allocate)
            negotiator.submit(request).wait()
            assert outputs[0].tolist() == [0] + [1] * rows

    run(2, main)


@pytest.mark.parametrize("background", [False, True])
def test_ranks_may_submit_in_any_order(background: bool) -> None:
    def main(negotiator: Negotiator) -> None:
        for _ in range(3):
            data = {f"t{i}": np.array([i + negotiator.rank]) for i in range(6)}
            names = sorted(data, reverse=negotiator.rank % 2 == 1)
            handles = [negotiator.submit(allreduce(name, data[name]), background=background) for name in names]
            for handle in handles:
                handle.wait()
                assert handle.done()
            assert [int(data[f"t{i}"][0]) for i in range(6)] == [3 * i + 3 for i in range(6)]

    run(3, main)


def test_background_operations_complete_while_nobody_waits() -> None:
    def main(negotiator: Negotiator) -> None:
        data = np.array([1.0])
        handle = negotiator.submit(allreduce("x", data), background=True)
        poll = threading.Event()
        for _ in range(20_000):
            if handle.done():
                break
            poll.wait(0.001)
        assert handle.done()
        assert data[0] == 2.0

    run(2, main)


def test_foreground_operations_start_no_driver_thread() -> None:
    def main(negotiator: Negotiator) -> None:
        data = np.array([1.0])
        negotiator.submit(allreduce("x", data)).wait()
        assert not any(thread.name == "unidist-negotiator" for thread in threading.enumerate())

    run(2, main)


def test_threads_of_one_rank_may_wait_at_the_same_time() -> None:
    def main(negotiator: Negotiator) -> None:
        wrong: list[str] = []

        def loop(thread: int) -> None:
            for _ in range(30):
                data = np.array([thread])
                negotiator.submit(allreduce(f"t{thread}", data), background=thread % 3 == 2).wait()
                if data[0] != 2 * thread:
                    wrong.append(f"thread {thread} got {data[0]}")

        threads = [threading.Thread(target=loop, args=(i,)) for i in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong

    run(2, main)


class TestWire:
    """What a steady loop costs."""

    def test_a_known_operation_costs_one_small_exchange(self) -> None:
        def main(communicator: Communicator) -> None:
            recorder = RecordingCommunicator(communicator)
            negotiator = Negotiator(recorder)
            data = np.ones(10, np.float32)
            negotiator.submit(allreduce("x", data)).wait()
            assert recorder.count("allgather") == 2  # the block, and the request in full
            recorder.records.clear()
            for _ in range(5):
                negotiator.submit(allreduce("x", data)).wait()
            assert [(each.operation, each.nbytes) for each in recorder.records] == [
                ("allgather", BLOCK_BYTES),
                ("allreduce", 40),
            ] * 5
            communicator.barrier().wait()
            negotiator.close()

        with ThreadWorld(3) as world:
            world.run(main)

    def test_small_allreduces_are_fused_and_large_ones_are_not(self) -> None:
        def main(communicator: Communicator) -> None:
            recorder = RecordingCommunicator(communicator)
            negotiator = Negotiator(recorder, NegotiationOptions(fusion_threshold_bytes=3 << 20))
            small = [np.full(1000, i, np.float32) for i in range(5)]
            large = np.ones((1 << 18) + 1, np.float32)
            integers = np.ones(4, np.int32)
            requests = [allreduce(f"s{i}", each) for i, each in enumerate(small)]
            requests += [allreduce("large", large), allreduce("integers", integers)]
            for handle in [negotiator.submit(request) for request in requests]:
                handle.wait()
            sizes = [each.nbytes for each in recorder.records if each.operation == "allreduce"]
            assert sizes == [20_000, (1 << 20) + 4, 16]
            assert all((each == 2 * i).all() for i, each in enumerate(small))
            assert (large == 2).all()
            assert (integers == 2).all()
            communicator.barrier().wait()
            negotiator.close()

        with ThreadWorld(2) as world:
            world.run(main)

    def test_fusion_stops_at_the_threshold_and_zero_turns_it_off(self) -> None:
        def sizes(threshold: int) -> list[int]:
            def main(communicator: Communicator) -> list[int]:
                recorder = RecordingCommunicator(communicator)
                negotiator = Negotiator(recorder, NegotiationOptions(fusion_threshold_bytes=threshold))
                handles = [negotiator.submit(allreduce(f"t{i}", np.ones(100, np.uint8))) for i in range(5)]
                for handle in handles:
                    handle.wait()
                communicator.barrier().wait()
                negotiator.close()
                return [each.nbytes for each in recorder.records if each.operation == "allreduce"]

            with ThreadWorld(2) as world:
                return world.run(main)[0]

        assert sizes(200) == [200, 200, 100]
        assert sizes(0) == [100] * 5

    def test_more_operations_than_a_block_holds_take_further_cycles(self) -> None:
        def main(negotiator: Negotiator) -> None:
            for _ in range(2):  # in full, then by id
                data = [np.array([i]) for i in range(600)]
                handles = [negotiator.submit(allreduce(f"a_rather_long_name_{i}", each)) for i, each in enumerate(data)]
                for handle in handles:
                    handle.wait()
                assert [int(each[0]) for each in data] == [2 * i for i in range(600)]

        run(2, main)


class TestMismatch:
    """The ranks ask for different things under one name."""

    @pytest.mark.parametrize(
        ("differing", "words"),
        [
            ({"shape": (4,)}, r"ranks 0, 2 asked for allreduce float32 \(2,\) sum.*rank 1 asked for .*\(4,\)"),
            ({"dtype": np.int32}, "float32.*int32"),
            ({"op": ReduceOp.MAX}, "sum.*max"),
            ({"scale": 0.5}, "scale 0.5"),
        ],
    )
    def test_raises_on_every_rank_and_stays_usable(self, differing: dict[str, Any], words: str) -> None:
        def main(negotiator: Negotiator) -> None:
            options = dict(differing) if negotiator.rank == 1 else {}
            data = np.ones(options.pop("shape", (2,)), options.pop("dtype", np.float32))
            with pytest.raises(MismatchError, match=words):
                negotiator.submit(allreduce("grad", data, **options)).wait()
            good = np.ones(2, np.float32)
            for _ in range(2):
                negotiator.submit(allreduce("grad", good)).wait()
            assert good.tolist() == [9.0, 9.0]

        run(3, main)

    def test_of_kinds_and_roots(self) -> None:
        def main(negotiator: Negotiator) -> None:
            data = Buffer.of(np.ones(2))
            copied = Request("x", OperationKind.BROADCAST, target=data, shape=(2,), root=negotiator.rank)
            with pytest.raises(MismatchError, match=r"from root 0; rank 1 asked for .* from root 1"):
                negotiator.submit(copied).wait()
            other = Request("x", OperationKind.BARRIER) if negotiator.rank else allreduce("x", np.ones(2))
            with pytest.raises(MismatchError, match="rank 1 asked for barrier"):
                negotiator.submit(other).wait()

        run(2, main)

    def test_of_a_name_that_was_agreed_on_before(self) -> None:
        def main(negotiator: Negotiator) -> None:
            negotiator.submit(allreduce("x", np.ones(2))).wait()
            with pytest.raises(MismatchError):
                negotiator.submit(allreduce("x", np.ones(2 + negotiator.rank))).wait()
            data = np.ones(2)
            negotiator.submit(allreduce("x", data)).wait()
            assert data[0] == 2

        run(2, main)


class TestWrongUse:
    """What one rank can see without the others is raised at once."""

    def test_of_a_name_that_is_under_way(self) -> None:
        def main(negotiator: Negotiator) -> None:
            handle = negotiator.submit(allreduce("x", np.ones(1)))
            with pytest.raises(DuplicateNameError, match="'x' was submitted on rank") as caught:
                negotiator.submit(allreduce("x", np.ones(1)))
            assert isinstance(caught.value, ValueError)
            handle.wait()
            negotiator.submit(allreduce("x", np.ones(1))).wait()

        run(2, main)

    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda b: Request("x", OperationKind.ALLREDUCE, b, b, (3,)), r"2 elements is not of shape \(3,\)"),
            (lambda b: Request("x", OperationKind.ALLREDUCE, b, b.slice(0, 1), (2,)), "target holds 1 float64"),
            (lambda b: Request("x", OperationKind.BROADCAST, target=b, shape=(2,), root=5), "choices: 0 to 0"),
            (lambda b: Request("x", OperationKind.ALLGATHER, b, shape=(2,)), "give allocate_output"),
            (
                lambda b: Request(
                    "x", OperationKind.ALLTOALL, b, shape=(2,), splits=(1,), allocate_output=lambda rows: b
                ),
                "add up to the 2 rows",
            ),
            (lambda b: Request("x", OperationKind.REDUCESCATTER, b.slice(0, 1), b.slice(0, 1)), "scalar"),
            (
                lambda b: Request(
                    "x", OperationKind.ALLREDUCE, Buffer.of(np.ones(1, np.complex64)), op=ReduceOp.MIN, shape=(1,)
                ),
                "no order",
            ),
        ],
    )
    def test_of_a_request_that_cannot_run(self, make: Callable[[Buffer], Request], words: str) -> None:
        def main(negotiator: Negotiator) -> None:
            with pytest.raises(UsageError, match=words):
                negotiator.submit(make(Buffer.of(np.ones(2))))

        run(1, main)

    def test_of_a_result_that_is_not_there_yet(self) -> None:
        def main(negotiator: Negotiator) -> None:
            handle = negotiator.submit(allreduce("x", np.ones(1)))
            with pytest.raises(UsageError, match="call wait"):
                _ = handle.result
            handle.wait()
            assert handle.result.count == 1

        run(1, main)

    def test_of_a_closed_negotiator(self) -> None:
        def main(communicator: Communicator) -> None:
            negotiator = Negotiator(communicator)
            negotiator.close()
            negotiator.close()
            with pytest.raises(UsageError, match="closed"):
                negotiator.submit(allreduce("x", np.ones(1)))

        with ThreadWorld(1) as world:
            world.run(main)


class TestFailure:
    """Something breaks while operations are under way."""

    @pytest.mark.parametrize("background", [False, True])
    def test_of_the_communicator_ends_all_operations_and_later_ones(self, background: bool) -> None:
        def main(communicator: Communicator) -> None:
            if communicator.rank == 1:
                return  # never submits; aborts when rank 0 waits
            negotiator = Negotiator(communicator)
            handles = [negotiator.submit(allreduce(name, np.ones(1)), background=background) for name in "ab"]
            threading.Timer(0.05, communicator.abort, ("a peer died",)).start()
            for handle in handles:
                with pytest.raises(PeerLostError, match="a peer died") as caught:
                    handle.wait()
                assert caught.value.__notes__ == ["rank 0 was in named operations: 'a', 'b'"]
            with pytest.raises(PeerLostError, match="a peer died"):
                negotiator.submit(allreduce("c", np.ones(1)))
            negotiator.close()

        with ThreadWorld(2) as world:
            world.run(main)

    def test_of_an_output_allocation_reaches_every_rank(self) -> None:
        def main(negotiator: Negotiator) -> None:
            def allocate(rows: tuple[int, ...]) -> Buffer:
                if negotiator.rank == 0:
                    raise MemoryError("no room")
                return Buffer.of(np.zeros(sum(rows)))

            data = Buffer.of(np.ones(1))
            request = Request("x", OperationKind.ALLGATHER, data, shape=(1,), allocate_output=allocate)
            with pytest.raises(MemoryError if negotiator.rank == 0 else PeerLostError, match="no room"):
                negotiator.submit(request).wait()

        run(2, main)

    def test_of_a_wait_that_was_interrupted_reaches_every_rank(self) -> None:
        class Interrupted(RecordingCommunicator):
            def allgather(self, source: Buffer, target: Buffer, *, counts: Sequence[int] | None = None) -> Work:
                raise KeyboardInterrupt

        def main(communicator: Communicator) -> None:
            negotiator = Negotiator(Interrupted(communicator) if communicator.rank == 0 else communicator)
            handle = negotiator.submit(allreduce("x", np.ones(1)))
            if communicator.rank == 0:
                with pytest.raises(KeyboardInterrupt):
                    handle.wait()
            with pytest.raises(PeerLostError, match="rank 0 was interrupted by KeyboardInterrupt"):
                handle.wait()
            negotiator.close()

        with ThreadWorld(2) as world:
            world.run(main)

    @pytest.mark.parametrize("background", [False, True])
    def test_close_ends_operations_under_way_on_every_rank(self, background: bool) -> None:
        submitted = threading.Barrier(2, timeout=30)

        def main(communicator: Communicator) -> None:
            negotiator = Negotiator(communicator)
            # Both ranks take part in cycles, so rank 1 learns of the end whatever it waits in.
            handle = negotiator.submit(allreduce(f"only_{communicator.rank}", np.ones(1)), background=background)
            submitted.wait()
            if communicator.rank == 0:
                threading.Timer(0.05, negotiator.close).start()
            with pytest.raises(PeerLostError, match=r"closed the negotiator while .*'only_0'"):
                handle.wait()
            negotiator.close()

        with ThreadWorld(2) as world:
            world.run(main)

    def test_a_wait_ends_at_its_own_time_limit(self) -> None:
        def main(communicator: Communicator) -> None:
            if communicator.rank == 1:
                return
            negotiator = Negotiator(communicator)
            handle = negotiator.submit(allreduce("x", np.ones(1)))
            with pytest.raises(StalledError, match=r"'x' .* submitted by rank 0; nothing is known of rank 1") as caught:
                handle.wait(timedelta(seconds=0.1))
            assert caught.value.ranks == (1,)
            negotiator.close()

        with ThreadWorld(2) as world:
            world.run(main)


def test_a_rank_that_has_joined_takes_part_with_zeros_until_all_have() -> None:
    def main(negotiator: Negotiator) -> tuple[int, list[float], list[str]]:
        served: list[str] = []
        sums = []
        for _step in range(negotiator.rank + 1):
            data = np.full(3, 10.0**negotiator.rank)
            negotiator.submit(allreduce("loss", data)).wait()
            sums.append(float(data[0]))
        return negotiator.join(served.append), sums, served

    results = run(3, main)
    assert [last for last, _, _ in results] == [2, 2, 2]
    assert [sums for _, sums, _ in results] == [[111.0], [111.0, 110.0], [111.0, 110.0, 100.0]]
    assert [served for _, _, served in results] == [["loss", "loss"], ["loss"], []]


def test_ranks_may_join_again_and_again_and_use_remembered_names_in_between() -> None:
    def main(negotiator: Negotiator) -> list[int]:
        last = []
        for epoch in range(3):
            for _ in range(2 + (negotiator.rank == epoch % 2)):
                data = np.ones(2)
                negotiator.submit(allreduce("a", data)).wait()
            last.append(negotiator.join(lambda name: None))
            both = np.ones(2)
            negotiator.submit(allreduce("a", both)).wait()
            assert both[0] == negotiator.size
        return last

    assert run(2, main) == [[0, 1, 0], [0, 1, 0]]


def test_fused_and_background_operations_run_with_the_zeros_of_a_joined_rank() -> None:
    def main(negotiator: Negotiator) -> list[float]:
        if negotiator.rank == 1:
            negotiator.join(lambda name: None)
            return []
        data = [np.full(4, float(i)) for i in range(20)]
        handles = [negotiator.submit(allreduce(str(i), each), background=True) for i, each in enumerate(data)]
        for handle in handles:
            handle.wait()
        negotiator.join(lambda name: None)
        return [float(each[0]) for each in data]

    assert run(2, main)[0] == [float(i) for i in range(20)]


def test_what_zeros_would_change_is_an_error_for_the_active_ranks_and_the_join_goes_on() -> None:
    def main(negotiator: Negotiator) -> int:
        if negotiator.rank == 1:
            return negotiator.join(lambda name: None)
        with pytest.raises(MismatchError, match="rank 1 called join"):
            negotiator.submit(allreduce("lowest", np.ones(1), op=ReduceOp.MIN)).wait()
        return negotiator.join(lambda name: None)

    assert run(2, main) == [0, 0]


def test_a_joined_rank_waits_longer_than_the_timeout_as_long_as_the_others_go_on() -> None:
    def main(negotiator: Negotiator) -> int:
        if negotiator.rank == 0:
            end = time.monotonic() + 3
            while time.monotonic() < end:
                negotiator.submit(allreduce("step", np.ones(1))).wait()
                time.sleep(0.05)
        return negotiator.join(lambda name: None)

    assert run(2, main, timeout=1.5 * SECONDS) == [0, 0]


def test_a_joined_rank_gives_up_when_the_others_do_nothing() -> None:
    release = threading.Event()

    def main(negotiator: Negotiator) -> str:
        if negotiator.rank == 0:
            release.wait(60)
            return ""
        try:
            with pytest.raises(StalledError, match=r"rank 0") as caught:
                negotiator.join(lambda name: None)
            return str(caught.value)
        finally:
            release.set()

    assert "<join>" in run(2, main, timeout=0.5 * SECONDS)[1]


def test_the_time_in_which_a_handle_is_waited_for_is_added_up() -> None:
    def main(negotiator: Negotiator) -> tuple[float, float, float]:
        recorder = negotiator._recorder = Recorder()  # each rank's own
        handle = negotiator.submit(allreduce("a", np.ones(1)))
        began = time.monotonic()
        handle.wait()
        seconds, first = time.monotonic() - began, recorder.waited_sec
        handle.wait()  # it is done: nobody waits
        return first, seconds, recorder.waited_sec

    for first, seconds, second in run(2, main):
        assert 0.0 < first <= seconds
        assert second == first
