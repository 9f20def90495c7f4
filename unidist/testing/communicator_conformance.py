"""The conformance suite of communicators: subclass it, name your engine, run pytest.

    from unidist.testing import CommunicatorConformance

    class TestMyEngine(CommunicatorConformance):
        engine = "mine"

The engine must be registered (the entry point of an installed plugin). The cases run in real processes; the conftest
needs `pytest_plugins = ["unidist.testing.fixtures"]`. Attributes tell what an engine does not promise; everything
else is the contract of `unidist.communicator`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import pytest

from unidist.buffer import DType
from unidist.communicator import Communicator, ReduceOp
from unidist.testing import _rank_side
from unidist.testing.cases import collective as collectives
from unidist.testing.cases import failure as failures
from unidist.testing.cases import group as groups
from unidist.testing.cases import message as messages
from unidist.testing.cases import stress as _stress_cases
from unidist.testing.fixtures import RankPoolFactory


class CommunicatorConformance:
    """See the module's text. Each attribute may be replaced in a subclass.

    Attributes:
        engine: the engine's registered name.
        sizes: numbers of ranks to test with.
        env: environment of the ranks.
        dtypes: element types that the engine moves and reduces.
        unsupported: (dtype, reduction) pairs that the engine refuses, with UsageError.
        nan_ops: reductions that carry a NaN of any rank into the result.
        detects_mismatch: as in the engine's capabilities; False: differing calls are not tested.
        detects_message_size: a receive of another size than was sent is a MismatchError.
        names_missing_ranks: StalledError of a collective says who did not come.
        names_lost_ranks: PeerLostError says who died.
        abort_reaches_peers: `abort` on one rank ends the waits of the others.
        abort_carries_reason: and its reason is in their message.
        shares_memory: it has the capability `SharesMemory`.
        in_processes: each rank is a process: it can be killed, and what it holds can be counted.
        death_bound_sec: longest time from the death of a rank to PeerLostError on the others. It tells a loss that was
            noticed from a timeout (a third of `case_timeout`), and measures nothing: a busy machine needs seconds.
        abort_bound_sec: longest time from `abort` to PeerLostError, likewise.
        moments: of `_failure_cases.MOMENTS`: when a rank dies.
        life_cycles: how often a communicator is made and closed to look for leaks.
        seeds: of the random programs.
        in_pairs: collectives on every pair of dtype, reduction, count and kind of memory instead of (nearly) every
            combination: a tenth of the operations, for an engine that needs milliseconds for each.
        case_timeout: longest time for one case.
    """

    engine: ClassVar[str]
    sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4, 8)
    env: ClassVar[Mapping[str, str]] = {}
    dtypes: ClassVar[Sequence[DType]] = tuple(DType)
    unsupported: ClassVar[Collection[tuple[DType, ReduceOp]]] = ()
    nan_ops: ClassVar[Sequence[ReduceOp]] = tuple(ReduceOp)
    detects_mismatch: ClassVar[bool] = True
    detects_message_size: ClassVar[bool] = True
    names_missing_ranks: ClassVar[bool] = True
    names_lost_ranks: ClassVar[bool] = True
    abort_reaches_peers: ClassVar[bool] = True
    abort_carries_reason: ClassVar[bool] = True
    shares_memory: ClassVar[bool] = False
    in_processes: ClassVar[bool] = True
    death_bound_sec: ClassVar[float] = 30.0
    abort_bound_sec: ClassVar[float] = 30.0
    moments: ClassVar[Sequence[failures.Moment]] = failures.MOMENTS
    life_cycles: ClassVar[int] = 100
    seeds: ClassVar[Sequence[int]] = (1, 2, 3)
    in_pairs: ClassVar[bool] = False
    case_timeout: ClassVar[timedelta] = timedelta(seconds=120)

    wrap: ClassVar[Callable[[Communicator], Communicator] | None] = None
    """A static method that makes another communicator of the engine's, to test that instead."""

    # How cases get to the ranks. A suite for something else than processes replaces these two.

    @pytest.fixture(autouse=True)
    def _use_pool(self, rank_pool: RankPoolFactory) -> None:
        self._rank_pool = rank_pool

    def run(self, size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
        """Return `case(communicator, *args)` of every rank, over a fresh communicator."""
        return self._run(size, _rank_side.run_connected, case, args)

    def run_connecting(self, size: int, case: Callable[..., Any], *args: Any) -> list[Any]:
        """Return `case(connector, *args)` of every rank; the case makes its communicators itself."""
        return self._run(size, _rank_side.run_connecting, case, args)

    def _run(self, size: int, runner: Callable[..., Any], case: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        meeting = secrets.token_hex(4)
        connector = _rank_side.EngineConnector(self.engine, meeting, self.case_timeout / 3, type(self).wrap)
        pool = self._rank_pool(size, env=self.env)
        return pool.run(runner, (connector, case, args), timeout=self.case_timeout)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give each test the sizes of this class that it makes sense for."""
        # Of the scope "class": the cases of one size follow each other, so that few ranks are alive at a time.
        if "size" in metafunc.fixturenames:
            metafunc.parametrize("size", self.sizes, scope="class")
        if "group_size" in metafunc.fixturenames:  # something is to happen between ranks
            metafunc.parametrize("group_size", [size for size in self.sizes if size > 1], scope="class")
        if "seed" in metafunc.fixturenames:
            metafunc.parametrize("seed", self.seeds)
        if "moment" in metafunc.fixturenames:
            metafunc.parametrize("moment", self.moments)

    def _need_processes(self) -> None:
        if not self.in_processes:
            pytest.skip(f"the ranks of {self.engine} are not processes")

    # Collectives

    def test_allreduce_gives_numpys_result_for_every_type(self, size: int) -> None:
        check_identical(
            self.run(size, collectives.allreduce_of_every_type, self.dtypes, self.unsupported, self.in_pairs)
        )

    def test_allreduce_of_more_than_fits_any_staging(self, size: int) -> None:
        check_identical(self.run(size, collectives.allreduce_of_large_arrays, self.dtypes))

    def test_allreduce_rounds_little_and_gives_every_rank_the_same_bits(self, size: int) -> None:
        check_identical(self.run(size, collectives.allreduce_rounds_little_and_identically, self.dtypes))

    def test_means_of_integers_are_exact_and_truncate(self, size: int) -> None:
        check_identical(self.run(size, collectives.integer_means_are_exact_and_truncate, self.dtypes))

    def test_nan_reaches_every_rank(self, size: int) -> None:
        self.run(size, collectives.nan_reaches_every_rank, self.dtypes, self.nan_ops)

    def test_allgather_of_even_uneven_and_no_elements(self, size: int) -> None:
        check_identical(self.run(size, collectives.allgather, self.dtypes, self.in_pairs))

    def test_broadcast_from_every_root(self, size: int) -> None:
        check_identical(self.run(size, collectives.broadcast, self.dtypes))

    def test_reducescatter_of_even_uneven_and_no_elements(self, size: int) -> None:
        self.run(size, collectives.reducescatter, self.dtypes, self.unsupported, self.in_pairs)

    def test_alltoall_of_uneven_counts(self, size: int) -> None:
        self.run(size, collectives.alltoall, self.dtypes)

    def test_wrong_arguments_are_refused_on_the_spot(self, size: int) -> None:
        self.run(size, collectives.wrong_arguments_are_refused_on_the_spot)

    def test_barrier_lets_nobody_go_before_all_have_come(self, size: int) -> None:
        for passages in zip(*self.run(size, groups.barrier_times), strict=True):
            last_came, first_left = max(came for came, _ in passages), min(left for _, left in passages)
            assert first_left >= last_came, f"a rank left a barrier {last_came - first_left:.6f} s before another came"

    # Messages

    def test_messages_of_every_size_go_around_the_ring(self, group_size: int) -> None:
        self.run(group_size, messages.ring)

    def test_many_messages_keep_their_order(self, group_size: int) -> None:
        self.run(group_size, messages.messages_keep_their_order)

    def test_a_sent_buffer_may_be_changed_after_its_wait(self, group_size: int) -> None:
        self.run(group_size, messages.a_sent_buffer_may_be_changed_after_its_wait)

    def test_receives_are_filled_in_the_order_asked(self, group_size: int) -> None:
        self.run(group_size, messages.receives_are_filled_in_the_order_asked)

    def test_messages_and_collectives_mix(self, group_size: int) -> None:
        self.run(group_size, messages.messages_and_collectives_mix)

    def test_a_message_that_nobody_took_does_not_stop_a_barrier(self, group_size: int) -> None:
        self.run(group_size, messages.a_message_that_nobody_took_does_not_stop_a_barrier)

    def test_a_receive_that_nobody_waits_for_does_not_stop_its_sender(self, group_size: int) -> None:
        self.run(group_size, messages.a_receive_that_nobody_waits_for_does_not_stop_its_sender)

    def test_a_message_of_another_size_is_a_mismatch(self, group_size: int) -> None:
        if not self.detects_message_size:
            pytest.skip(f"{self.engine} does not promise it")
        self.run(group_size, messages.a_message_of_another_size_is_a_mismatch)

    def test_one_rank_may_only_send(self, group_size: int) -> None:
        self.run(group_size, messages.one_way_stream)

    # Groups and works

    def test_works_may_be_waited_for_in_reverse(self, size: int) -> None:
        self.run(size, groups.works_are_waited_in_reverse)

    def test_polling_alone_completes_an_operation(self, size: int) -> None:
        self.run(size, groups.polling_alone_completes)

    def test_splits_of_every_kind(self, size: int) -> None:
        self.run(size, groups.splits_of_every_kind)

    def test_a_split_without_this_rank_is_refused(self, size: int) -> None:
        self.run(size, groups.a_split_without_this_rank_is_refused)

    def test_operations_of_parent_and_child_interleave(self, size: int) -> None:
        self.run(size, groups.parent_and_child_interleave)

    def test_allocated_memory_is_zeroed_and_outlives_its_communicator(self, size: int) -> None:
        self.run(size, groups.allocated_memory_is_zeroed_and_outlives_the_communicator)

    def test_shared_memory_is_seen_by_all_and_written_to_by_each(self, size: int) -> None:
        if not self.shares_memory:
            pytest.skip(f"{self.engine} does not promise it")
        self.run(size, groups.shared_memory_is_seen_by_all_and_written_to_by_each)
        self.run(size, groups.ranks_that_share_differing_amounts)

    def test_blocks_are_exchanged_in_one_call(self, size: int) -> None:
        if not all(self.run(size, groups.blocks_are_exchanged_in_one_call)):
            pytest.skip(f"{self.engine} does not promise it")

    def test_random_programs_give_numpys_results(self, size: int, seed: int) -> None:
        self.run(size, _stress_cases.random_program, seed, 120)

    # Failures

    def test_differing_calls_raise_on_every_rank_and_the_communicator_goes_on(self, group_size: int) -> None:
        if not self.detects_mismatch:
            pytest.skip(f"{self.engine} does not promise it")
        for texts in self.run(group_size, failures.mismatches_reach_every_rank):
            for text in texts:
                assert f"rank {group_size - 1}" in text, (
                    f"the message does not say what rank {group_size - 1} called: {text}"
                )

    def test_a_rank_that_does_not_come_ends_in_stalled_error(self, group_size: int) -> None:
        limit = timedelta(seconds=1)
        outcomes = self.run_connecting(group_size, failures.a_rank_that_does_not_come, limit)
        kinds = [kind for kind, *_ in outcomes]
        assert kinds.pop() == "absent"
        assert "StalledError" in kinds, outcomes
        for kind, text, ranks, seconds in outcomes[:-1]:
            assert seconds < limit.total_seconds() + self.abort_bound_sec, (
                f"waited {seconds:.1f} s for {limit.total_seconds():g}: {text}"
            )
            if kind == "StalledError" and self.names_missing_ranks:
                assert ranks == (group_size - 1,), text
                assert f"{group_size - 1}" in text

    def test_the_timeout_of_a_wait_counts(self, group_size: int) -> None:
        seconds = self.run_connecting(group_size, failures.a_short_wait)[0]
        assert 0.2 <= seconds < self.abort_bound_sec, "as long as the communicator's own timeout"

    @pytest.mark.parametrize("operation", ["barrier", "allreduce", "recv"])
    def test_abort_from_another_thread_ends_every_wait(self, group_size: int, operation: str) -> None:
        if not self.abort_reaches_peers:
            pytest.skip(f"{self.engine} does not promise it")
        outcomes = self.run_connecting(group_size, failures.abort_ends_every_wait, operation)
        aborted_at = outcomes[0][0]
        for rank, (_, ended, text) in enumerate(outcomes):
            assert ended - aborted_at < self.abort_bound_sec, (
                f"rank {rank} noticed after {ended - aborted_at:.2f} s: {text}"
            )
            assert "reason forty-two" in text or not self.abort_carries_reason, f"rank {rank} got no reason: {text}"

    def test_operations_after_close_are_usage_errors(self, size: int) -> None:
        self.run_connecting(size, failures.operations_after_close)

    def test_the_death_of_a_rank_is_noticed_by_all_others(self, group_size: int, moment: str) -> None:
        self._need_processes()
        victim = group_size - 1 if moment in ("recv", "barrier") else group_size // 2
        meeting = secrets.token_hex(4)
        connector = _rank_side.EngineConnector(self.engine, meeting, self.case_timeout / 3, type(self).wrap)
        pool = self._rank_pool(group_size, env=self.env)
        per_rank = [((victim, moment, rank),) for rank in range(group_size)]
        outcomes = pool.run(
            _rank_side.run_connecting, (connector, failures.death), per_rank_args=per_rank, timeout=self.case_timeout
        )
        died = outcomes[victim][1]
        for rank, (kind, when, ranks, text) in enumerate(outcomes):
            if rank != victim:
                assert kind == "noticed"
                assert when - died < self.death_bound_sec, f"rank {rank} noticed after {when - died:.2f} s: {text}"
                assert ranks == (victim,) or not self.names_lost_ranks, (
                    f"rank {rank} names ranks {ranks}, not {victim}: {text}"
                )

    def test_many_lives_leave_nothing_behind(self, size: int) -> None:
        self._need_processes()
        for early, late in self.run_connecting(size, failures.many_lives, self.life_cycles):
            assert late <= early, f"threads, mappings and descriptors grew from {early} to {late}"

    def test_splits_are_given_back(self, size: int) -> None:
        self._need_processes()
        for early, late in self.run(size, failures.splits_are_given_back, 50):
            assert late <= early, f"threads, mappings and descriptors grew from {early} to {late}"


def check_identical(digests: Sequence[Mapping[str, int]]) -> None:
    """Raise AssertionError, with the first difference, unless all ranks computed the same things to the same bits."""
    assert digests[0], "nothing was computed"
    for rank, found in enumerate(digests):
        assert found.keys() == digests[0].keys(), f"rank {rank} computed other things than rank 0"
        for what, digest in found.items():
            assert digest == digests[0][what], f"{what}: the bits on rank {rank} differ from those on rank 0"
