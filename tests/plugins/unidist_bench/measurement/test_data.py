"""Every collective on threads: right results are right, and those of a call that does nothing are wrong."""

from __future__ import annotations

import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist.negotiation import Negotiator
from unidist.testing import ThreadCommunicator, ThreadWorld
from unidist_bench.collectives import TRAITS, Collective
from unidist_bench.measurement import MeasuredCall, MeasurementOrder, Side
from unidist_bench.measurement.data import count_wrong, make_call, prepare
from unidist_bench.measurement.ours import CommunicatorSide, NamedSide
from unidist_bench.sizes import Sizes

WITH_DATA = [each for each in Collective if TRAITS[each].has_data]


def call_of(
    collective: Collective, comm: ThreadCommunicator, *, dtype: DType, op: ReduceOp, in_place: bool
) -> MeasuredCall:
    count = 6 * comm.size
    areas = [Buffer.allocate(count * dtype.itemsize, DType.UINT8) for _ in range(2)]
    place = {"rank": comm.rank, "size": comm.size, "root": comm.size - 1}
    return make_call(collective, areas, count, dtype=dtype, op=op, in_place=in_place, **place)


def wrong_after(side: Side, call: MeasuredCall, comm: ThreadCommunicator) -> int:
    prepare(call)
    comm.barrier().wait()
    side.operation(call)()
    return count_wrong(call)


@pytest.mark.parametrize("collective", list(Collective))
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT8, DType.BOOL, DType.COMPLEX64])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PRODUCT])
def test_right_results_are_found_right_plain_and_by_name(collective: Collective, dtype: DType, op: ReduceOp) -> None:
    traits = TRAITS[collective]
    ways = [True] if traits.only_in_place else [False, True] if traits.in_place else [False]

    def main(comm: ThreadCommunicator) -> list[int]:
        found = []
        negotiator = Negotiator(comm.split(range(comm.size)))
        sides: list[Side] = [CommunicatorSide(comm), *([NamedSide(negotiator)] if traits.can_be_named else [])]
        for in_place in ways:
            for side in sides:
                call = call_of(collective, comm, dtype=dtype, op=op, in_place=in_place)
                assert call.in_place == in_place
                found.append(wrong_after(side, call, comm))
        comm.barrier().wait()
        negotiator.close()
        return found

    with ThreadWorld(3) as world:
        results = world.run(main)
    assert [set(each) for each in results] == [{0}] * 3


@pytest.mark.parametrize("collective", WITH_DATA)
def test_a_call_that_does_nothing_is_found_wrong(collective: Collective) -> None:
    def main(comm: ThreadCommunicator) -> int:
        only = TRAITS[collective].only_in_place
        call = call_of(collective, comm, dtype=DType.FLOAT32, op=ReduceOp.SUM, in_place=only)
        prepare(call)
        return count_wrong(call)

    with ThreadWorld(3) as world:
        assert sum(world.run(main)) > 0


def test_an_in_place_all_reduce_that_leaves_the_exchange_out_is_found_wrong() -> None:
    def main(comm: ThreadCommunicator) -> int:
        call = call_of(Collective.ALLREDUCE, comm, dtype=DType.FLOAT32, op=ReduceOp.SUM, in_place=True)
        prepare(call)
        return count_wrong(call)

    with ThreadWorld(2) as world:
        assert min(world.run(main)) > 0


def test_an_order_arrives_as_it_was_given() -> None:
    order = MeasurementOrder(
        (Collective.ALLREDUCE, Collective.BARRIER),
        Sizes(8, 64, 4.0),
        dtype=DType.BFLOAT16,
        op=ReduceOp.MAX,
        in_place=False,
        beside=("gloo",),
        inner=3,
    )
    assert MeasurementOrder.from_plain(order.plain()) == order


def test_areas_are_as_large_and_as_many_as_the_largest_call_needs() -> None:
    sizes = Sizes(8, 1000)
    assert MeasurementOrder((Collective.ALLREDUCE,), sizes).areas(2) == (1, 512)
    assert MeasurementOrder((Collective.ALLREDUCE,), sizes, in_place=False).areas(2) == (2, 512)
    assert MeasurementOrder((Collective.ALLREDUCE, Collective.ALLGATHER), Sizes(8, 8)).areas(4) == (2, 16)
    assert MeasurementOrder((Collective.BARRIER,), sizes).areas(2) == (0, 0)


def test_small_sizes_are_called_several_times_and_large_ones_are_repeated_less() -> None:
    order = MeasurementOrder((Collective.ALLREDUCE,), Sizes(8, 64))
    assert order.repetitions(8) == (100, 20)
    assert order.repetitions(100_000_000) == (10, 1)
    assert order.repetitions(0) == (100, 20)
    assert MeasurementOrder((Collective.ALLREDUCE,), Sizes(8, 64), iterations=7, inner=2).repetitions(8) == (7, 2)
