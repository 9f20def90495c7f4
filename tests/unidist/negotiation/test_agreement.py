"""The replicated tables: equal inputs give equal orders, whatever each rank submits when."""

from __future__ import annotations

import random

import pytest

from unidist.buffer import Buffer, DType
from unidist.communicator import ReduceOp
from unidist.negotiation._agreement import MAX_REQUEST_BYTES, Agreement, Ready
from unidist.negotiation._wire import BLOCK_BYTES, MAX_IDS, decode_block, decode_requests
from unidist.negotiation.request import OperationKind, Request, Signature


def request(name: str, count: int = 1) -> Request:
    buffer = Buffer.allocate(count, DType.FLOAT32)
    return Request(name, OperationKind.ALLREDUCE, buffer, buffer, (count,))


def cycle(agreements: list[Agreement], submitted: list[list[Request]]) -> list[Ready]:
    """Let every rank announce and update; return the operations that became ready, the same on all."""
    announcements = [agreement.announce(new) for agreement, new in zip(agreements, submitted, strict=True)]
    assert [each.num_requests for each in announcements] == [len(new) for new in submitted]
    ids = [decode_block(each.block)[0] for each in announcements]
    requests = [decode_requests(each.requests) for each in announcements]
    results = [agreement.update(ids, requests) for agreement in agreements]
    assert all(result == results[0] for result in results)
    return results[0]


def names(ready: list[Ready]) -> list[str]:
    return [each.name for each in ready]


def test_an_operation_is_ready_when_the_last_rank_submits_it() -> None:
    agreements = [Agreement(rank, 2) for rank in range(2)]
    assert names(cycle(agreements, [[request("a"), request("b")], [request("b")]])) == ["b"]
    assert agreements[1].waiting.keys() == {"a"}
    assert names(cycle(agreements, [[], []])) == []
    assert names(cycle(agreements, [[request("b")], [request("a"), request("b")]])) == ["b", "a"]
    assert not agreements[0].waiting


def test_a_known_request_is_announced_by_a_small_id() -> None:
    agreements = [Agreement(rank, 2) for rank in range(2)]
    cycle(agreements, [[request("a")], [request("a")]])
    announcement = agreements[0].announce([request("a")])
    assert not announcement.requests
    assert len(announcement.block) == BLOCK_BYTES
    assert names(announcement.known) == ["a"]
    assert agreements[0].knows(request("a"))


def test_a_changed_request_is_announced_in_full_and_remembered() -> None:
    agreements = [Agreement(rank, 2) for rank in range(2)]
    cycle(agreements, [[request("a")], [request("a")]])
    assert not agreements[0].knows(request("a", 2))
    ready = cycle(agreements, [[request("a", 2)], [request("a", 2)]])
    assert [signature.shape for signature in ready[0].signatures] == [(2,), (2,)]
    assert agreements[0].knows(request("a", 2))


def test_a_mismatch_is_not_remembered() -> None:
    agreements = [Agreement(rank, 2) for rank in range(2)]
    (ready,) = cycle(agreements, [[request("a")], [request("a", 2)]])
    assert "rank 0 asked for allreduce float32 (1,) sum; rank 1 asked for allreduce float32 (2,) sum" in ready.mismatch
    assert not agreements[0].knows(request("a"))


def test_old_ids_are_reused_alike_on_every_rank() -> None:
    agreements = [Agreement(rank, 3, capacity=4) for rank in range(3)]
    generator = random.Random(0)
    outstanding: list[set[str]] = [set(), set(), set()]
    executed = 0
    for _ in range(500):
        submitted = []
        for rank in range(3):
            fresh = [f"n{i}" for i in generator.sample(range(9), 3) if f"n{i}" not in outstanding[rank]]
            outstanding[rank].update(fresh)
            submitted.append([request(name, 1 + len(name)) for name in fresh])
        for name in names(cycle(agreements, submitted)):
            executed += 1
            for each in outstanding:
                each.remove(name)
    assert executed > 300
    known = [[agreement.knows(request(f"n{i}", 3)) for i in range(9)] for agreement in agreements]
    assert known[0] == known[1] == known[2]
    assert sum(known[0]) == 4


def test_what_does_not_fit_waits_for_the_next_cycle() -> None:
    agreement = Agreement(0, 1)
    many = [request(f"n{i}") for i in range(MAX_IDS + 10)]
    cycle([agreement], [many])
    assert agreement.announce(many).num_requests == MAX_IDS
    long = [request("x" * (MAX_REQUEST_BYTES // 3) + str(i)) for i in range(5)]
    assert agreement.announce(long).num_requests == 2
    assert agreement.announce([request("x" * (2 * MAX_REQUEST_BYTES))]).num_requests == 1


@pytest.mark.parametrize("name", ["", "ü\n\u2028", "a\ud800b", '"quoted"\\', "x" * 10_000])
def test_any_name_survives_the_wire(name: str) -> None:
    agreements = [Agreement(rank, 2) for rank in range(2)]
    assert names(cycle(agreements, [[request(name), request("z")], [request("z"), request(name)]])) == ["z", name]


def join_request() -> tuple[str, Signature]:
    return "<join>", Request("<join>", OperationKind.JOIN).signature


def sum_request(name: str, op: ReduceOp = ReduceOp.SUM) -> tuple[str, Signature]:
    data = Buffer.allocate(2, DType.FLOAT32)
    return name, Request(name, OperationKind.ALLREDUCE, data, data, (2,), op).signature


def test_what_the_others_submit_is_ready_without_a_rank_that_has_joined() -> None:
    agreement = Agreement(0, 3)
    assert agreement.update([(), (), ()], [[], [sum_request("a")], [join_request()]]) == []
    (ready,) = agreement.update([(), (), ()], [[sum_request("a")], [], []])
    assert ready.name == "a"
    assert not ready.mismatch
    assert len(ready.signatures) == 3
    assert list(agreement.joined) == [2]


def test_a_join_makes_ready_what_only_that_rank_was_missing_for() -> None:
    agreement = Agreement(0, 2)
    assert agreement.update([(), ()], [[sum_request("a"), sum_request("b")], []]) == []
    assert [ready.name for ready in agreement.update([(), ()], [[], [join_request()]])] == ["a", "b"]


def test_the_last_rank_to_join_ends_the_join_for_all_and_a_new_one_can_begin() -> None:
    for _ in range(2):
        agreement = Agreement(1, 3)
        agreement.update([(), (), ()], [[], [join_request()], []])
        agreement.update([(), (), ()], [[], [], [join_request()]])
        (ready,) = agreement.update([(), (), ()], [[join_request()], [], []])
        assert ready.last_joined == 0
        assert not agreement.joined
        assert not agreement.waiting


@pytest.mark.parametrize(
    "request_of", [lambda: sum_request("a", ReduceOp.MIN), lambda: sum_request("a", ReduceOp.MAX)], ids=["min", "max"]
)
def test_what_zeros_would_change_cannot_be_done_while_a_rank_has_joined(request_of) -> None:  # type: ignore[no-untyped-def]
    agreement = Agreement(0, 2)
    agreement.update([(), ()], [[], [join_request()]])
    (ready,) = agreement.update([(), ()], [[request_of()], []])
    assert "rank 1 called join" in ready.mismatch


def test_what_was_done_without_a_joined_rank_gets_no_number() -> None:
    agreement = Agreement(0, 2)
    agreement.update([(), ()], [[], [join_request()]])
    agreement.update([(), ()], [[sum_request("a")], []])
    data = Buffer.allocate(2, DType.FLOAT32)
    assert not agreement.knows(Request("a", OperationKind.ALLREDUCE, data, data, (2,)))


def test_without_capacity_every_operation_is_announced_in_full_each_time() -> None:
    agreements = [Agreement(rank, 2, capacity=0) for rank in range(2)]
    for _ in range(3):
        assert all(agreement.announce([request("a")]).requests for agreement in agreements)
        assert names(cycle(agreements, [[request("a")]] * 2)) == ["a"]
