"""Random programs of named operations in random orders give what a direct computation gives, and end."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unidist.buffer import Buffer
from unidist.communicator import Communicator, ReduceOp
from unidist.errors import MismatchError
from unidist.negotiation import NamedHandle, NegotiationOptions, Negotiator, OperationKind, Request, reducescatter_rows
from unidist.testing.threads import ThreadWorld

ALLREDUCES = {ReduceOp.SUM: np.add, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum, ReduceOp.PRODUCT: np.multiply}


@dataclass(frozen=True)
class Step:
    """One named operation: the same on all ranks but for `odd_rank`, which asks for something else."""

    name: str
    kind: OperationKind
    dtype: str
    rows: int
    op: ReduceOp
    background: bool
    odd_rank: int | None

    def input_of(self, rank: int, size: int) -> np.ndarray:
        """Whole numbers, so that sums are exact in any order."""
        rows = self.rows
        if self.kind is OperationKind.ALLGATHER:
            rows += rank
        elif self.kind is OperationKind.ALLTOALL:
            rows = sum(self.splits_of(rank, size))
        seed = [rank, self.rows, *self.name.encode()]
        return np.random.default_rng(seed).integers(1, 5, (rows, 3)).astype(self.dtype)

    def splits_of(self, rank: int, size: int) -> tuple[int, ...]:
        return tuple((self.rows + rank + to) % 3 for to in range(size))

    def expected_on(self, rank: int, size: int) -> np.ndarray:
        inputs = [self.input_of(each, size) for each in range(size)]
        if self.kind is OperationKind.ALLREDUCE:
            return ALLREDUCES[self.op].reduce(inputs)
        if self.kind is OperationKind.REDUCESCATTER:
            rows = reducescatter_rows(self.rows, size)
            return ALLREDUCES[self.op].reduce(inputs)[sum(rows[:rank]) : sum(rows[: rank + 1])]
        if self.kind is OperationKind.ALLGATHER:
            return np.concatenate(inputs)
        if self.kind is OperationKind.BROADCAST:
            return inputs[self.rows % size]
        if self.kind is OperationKind.ALLTOALL:
            cuts = [np.split(inputs[each], np.cumsum(self.splits_of(each, size))[:-1]) for each in range(size)]
            return np.concatenate([pieces[rank] for pieces in cuts])
        return np.zeros(0)

    def start(self, negotiator: Negotiator, *, background: bool) -> tuple[NamedHandle, Callable[[], np.ndarray]]:
        """Submit it; the second value reads the result."""
        rank, size = negotiator.rank, negotiator.size
        data = self.input_of(rank, size)
        if rank == self.odd_rank:
            data = data.astype("int16")
        shape, source, target, splits = data.shape, Buffer.of(data), Buffer.of(data), ()
        outputs = [data]

        def allocate(rows: tuple[int, ...]) -> Buffer:
            outputs[0] = np.zeros((sum(rows), 3), data.dtype)
            return Buffer.of(outputs[0])

        if self.kind is OperationKind.REDUCESCATTER:
            outputs[0] = np.zeros((reducescatter_rows(self.rows, size)[rank], 3), data.dtype)
            target = Buffer.of(outputs[0])
        elif self.kind is OperationKind.ALLTOALL:
            splits = self.splits_of(rank, size)
        elif self.kind is OperationKind.BARRIER:
            outputs[0] = np.zeros(0)
        request = Request(
            self.name,
            self.kind,
            source,
            target,
            shape,
            self.op,
            self.rows % size,
            splits=splits,
            allocate_output=allocate,
        )
        return negotiator.submit(request, background=background), lambda: outputs[0]

    def check(self, negotiator: Negotiator, handle: NamedHandle, read: Callable[[], np.ndarray]) -> None:
        if self.odd_rank is not None and self.odd_rank < negotiator.size and negotiator.size > 1 and self._can_differ:
            with pytest.raises(MismatchError):
                handle.wait()
            return
        handle.wait()
        if not (self.odd_rank is not None and self._can_differ):  # else a single rank that is the odd one
            np.testing.assert_array_equal(read(), self.expected_on(negotiator.rank, negotiator.size))

    @property
    def _can_differ(self) -> bool:
        return self.kind is not OperationKind.BARRIER


steps = st.builds(
    Step,
    name=st.sampled_from([f"tensor.{i}" for i in range(12)]),
    kind=st.sampled_from([kind for kind in OperationKind if kind not in (OperationKind.ADASUM, OperationKind.JOIN)]),
    dtype=st.sampled_from(["float64", "int32", "float32"]),
    rows=st.sampled_from([0, 1, 3, 8]),
    op=st.sampled_from(ReduceOp),
    background=st.booleans(),
    odd_rank=st.sampled_from([None] * 7 + [0, 1]),
)
phases = st.lists(st.lists(steps, min_size=1, max_size=8, unique_by=lambda step: step.name), min_size=1, max_size=5)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.integers(1, 5), program=phases, repeats=st.integers(1, 3), seed=st.integers(0, 2**16), carries=st.booleans()
)
def test_random_programs_compute_the_right_values(
    size: int, program: list[list[Step]], repeats: int, seed: int, carries: bool
) -> None:
    def main(communicator: Communicator) -> None:
        communicator.capabilities = replace(communicator.capabilities, adds_in_rank_order=carries)
        negotiator = Negotiator(communicator, NegotiationOptions(fusion_threshold_bytes=200))
        shuffler = random.Random(seed * 16 + communicator.rank)  # another order on each rank
        for phase in program * repeats:
            # One operation is waited for where it is submitted, at another place on each rank; the others later.
            immediate, *later = phase
            order = list(phase)
            shuffler.shuffle(order)
            started = {}
            for step in order:
                started[step] = step.start(negotiator, background=step.background)
                if step is immediate:
                    step.check(negotiator, *started[step])
            shuffler.shuffle(later)
            for step in later:
                step.check(negotiator, *started[step])
        communicator.barrier().wait()  # nobody closes while a peer is in a cycle; nothing is pending any more
        negotiator.close()

    with ThreadWorld(size, timeout=timedelta(seconds=60)) as world:
        world.run(main, timeout=timedelta(seconds=120))
