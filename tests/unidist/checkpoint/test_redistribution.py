"""A model gives its values to models that are cut up in another way, on the same or other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from checkpoint_states import SHAPES, WAYS, convert, cut, numbers, piece

from unidist.buffer import Buffer, DType
from unidist.checkpoint import redistribution
from unidist.checkpoint.format.interface import KeepsState, MemoryState
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.checkpoint.redistribution import RedistributionRequest, redistribute
from unidist.communicator import Communicator
from unidist.errors import CheckpointError, UsageError
from unidist.testing.threads import ThreadWorld

Make = Callable[[int], KeepsState | None]


def run(
    size: int, source: Make, target: Make, *, ranks: Sequence[int] | None = None, **options: Any
) -> list[Any | Exception]:
    """Redistribute on ranks that are threads; return what each rank got, or raised."""

    def main(communicator: Communicator) -> Any:
        rank = communicator.rank
        taker = target(rank)
        strict = options.get("strict", True)
        try:
            found = redistribute(
                communicator,
                lambda: RedistributionRequest(None if ranks is None else tuple(ranks), strict),
                lambda: source(rank),
                lambda: taker,
                convert=convert,
            )
        except Exception as exc:
            return exc
        return taker if ranks is None else found

    with ThreadWorld(size) as world:
        return world.run(main)


def empty(held: Sequence[Piece], dtype: DType = DType.FLOAT32) -> MemoryState:
    """Return a state of these pieces without their values."""
    infos = [TensorInfo(each.tensor.name, each.tensor.shape, dtype) for each in held]
    pieces = zip(infos, held, strict=True)
    return MemoryState([Piece(info, each.part, Buffer.allocate(each.part.count, dtype)) for info, each in pieces])


def check(state: MemoryState, dtype: str = "float32") -> None:
    """Fail unless a state has the values of its pieces."""
    for each in state.pieces():
        expected = cut(numbers(each.tensor.name, each.tensor.shape), each.part)
        found = np.frombuffer(each.memory.bytes(), dtype) if each.part.count else np.zeros(0)
        np.testing.assert_array_equal(found, expected.astype(dtype), str(each.tensor))


@pytest.mark.parametrize("round_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("other_way", WAYS)
@pytest.mark.parametrize("way", WAYS)
def test_every_division_becomes_every_other(
    way: str, other_way: str, round_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redistribution, "ROUND_BYTES", round_bytes)
    outcomes = run(4, lambda rank: MemoryState(WAYS[way](rank, 4)), lambda rank: empty(WAYS[other_way](rank, 4)))
    for state in outcomes:
        check(state)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_train_give_to_ranks_that_do_not(way: str) -> None:
    outcomes = run(
        3,
        lambda rank: MemoryState(WAYS[way](rank, 2)) if rank < 2 else None,
        lambda rank: empty(WAYS["whole"](rank, 1)) if rank == 2 else None,
    )
    assert outcomes[:2] == [None, None]
    check(outcomes[2])


@pytest.mark.parametrize("way", WAYS)
def test_some_ranks_get_the_whole_model(way: str) -> None:
    outcomes = run(4, lambda rank: MemoryState(WAYS[way](rank, 4), {"rank": 7}), lambda rank: None, ranks=[1, 2])
    assert outcomes[0] is None
    assert outcomes[3] is None
    for tensors, values in outcomes[1:3]:
        assert values == {"rank": 7}
        assert {name: info.shape for name, (info, _) in tensors.items()} == SHAPES
        check(MemoryState([Piece(info, Part.whole(info.shape), memory) for info, memory in tensors.values()]))


def test_what_a_rank_has_itself_is_its_own_copy() -> None:
    held = [MemoryState(WAYS["whole"](rank, 2)) for rank in range(2)]
    for rank, (tensors, _) in enumerate(run(2, lambda rank: held[rank], lambda rank: None, ranks=[0, 1])):
        own = {each.tensor.name: each.memory.address for each in held[rank].pieces() if each.part.count}
        assert all(memory.address != own[name] for name, (_, memory) in tensors.items() if name in own)


def test_floating_point_types_are_converted() -> None:
    outcomes = run(
        2, lambda rank: MemoryState(WAYS["flat"](rank, 2)), lambda rank: empty(WAYS["columns"](rank, 2), DType.FLOAT64)
    )
    for state in outcomes:
        check(state, "float64")


def texts(outcomes: Sequence[Any], kind: type[Exception] = CheckpointError) -> list[str]:
    """Return the messages of all ranks, each of which has to have raised, in one line."""
    assert all(isinstance(each, kind) for each in outcomes), outcomes
    messages = [str(each) for each in outcomes]
    assert not any("\n" in each for each in messages)
    return messages


def one(name: str, shape: Sequence[int], dtype: str = "float32") -> MemoryState:
    """Return a state of one tensor of ones."""
    return MemoryState([piece(name, np.ones(shape, dtype))])


@pytest.mark.parametrize(
    ("taker", "text"),
    [
        (lambda: one("other", (2, 3)), "'other' float32[2, 3]"),
        (lambda: one("weight", (3, 3)), "'weight' float32[2, 3], here [3, 3]"),
        (lambda: one("weight", (2, 3), "int32"), "'weight' float32[2, 3] would become 'weight' int32[2, 3] on rank 1"),
    ],
)
def test_what_does_not_fit_on_one_rank_changes_nothing_on_any(taker: Callable[[], MemoryState], text: str) -> None:
    fits = MemoryState([piece("weight", np.zeros((2, 3), np.float32))])
    outcomes = run(2, lambda rank: one("weight", (2, 3)), lambda rank: taker() if rank else fits)
    assert all(text in message for message in texts(outcomes))
    assert not np.frombuffer(fits.pieces()[0].memory.bytes(), np.float32).any()


def test_a_looser_request_takes_what_both_have() -> None:
    taker = MemoryState([piece("weight", np.zeros(3, np.float32)), piece("more", np.zeros(2, np.float32))])
    outcomes = run(
        2, lambda rank: one("weight", (3,)) if rank else None, lambda rank: None if rank else taker, strict=False
    )
    assert outcomes == [taker, None]
    assert [np.frombuffer(each.memory.bytes(), np.float32).tolist() for each in taker.pieces()] == [[1] * 3, [0] * 2]


class Broken(MemoryState):
    """A state that cannot do what its name says."""

    def __init__(self, method: str) -> None:
        super().__init__([piece(name, numbers(name, shape)) for name, shape in SHAPES.items()])
        self._method = method
        if method == "memory":
            info = TensorInfo("table", SHAPES["table"], DType.FLOAT32)
            self._held = [*self._held[1:], Piece(info, Part.whole(info.shape), self._fail)]

    def __getattribute__(self, name: str) -> Any:
        if name not in ("_method", "_fail") and name == self._method:
            self._fail()
        return super().__getattribute__(name)

    def _fail(self) -> Any:
        raise MemoryError(f"no memory for {self._method}")


@pytest.mark.parametrize(
    ("side", "method"),
    [
        *(("source", method) for method in ("pieces", "values", "memory")),
        *(("target", method) for method in ("pieces", "names", "check", "load")),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(side: str, method: str) -> None:
    sources: list[MemoryState] = [MemoryState(WAYS["flat"](rank, 3)) for rank in range(3)]
    targets: list[MemoryState] = [empty(WAYS["whole"](rank, 3)) for rank in range(3)]
    if side == "source":
        sources = [Broken(method)] * 3 if method == "memory" else [*sources[:2], Broken(method)]
    else:
        targets[1] = Broken(method)
    to = [0] if side == "source" else None
    outcomes = run(3, sources.__getitem__, targets.__getitem__ if to is None else lambda _: None, ranks=to)
    assert all(f"MemoryError: no memory for {method}" in message for message in texts(outcomes))


def test_ranks_that_ask_for_different_things_are_an_error_on_each() -> None:
    def main(communicator: Communicator) -> Any:
        rank = communicator.rank
        try:
            request = RedistributionRequest((rank,) if rank else None)
            redistribute(communicator, lambda: request, lambda: one("w", ()), lambda: None, convert=None)
        except UsageError as exc:
            return exc
        return None

    with ThreadWorld(2) as world:
        messages = texts(world.run(main), UsageError)
    assert all("to a model with strict=True on rank 0, to ranks 1 with strict=True on rank 1" in m for m in messages)


@pytest.mark.parametrize(
    ("gives", "takes", "ranks", "text"),
    [
        (False, True, None, "the model is None on every rank"),
        (True, False, None, "`to` is None on every rank"),
        (True, False, [2], "names rank 2; choices: 0 to 1"),
    ],
)
def test_nothing_to_do_is_an_error(gives: bool, takes: bool, ranks: list[int] | None, text: str) -> None:
    outcomes = run(
        2, lambda rank: one("w", ()) if gives else None, lambda rank: one("w", ()) if takes else None, ranks=ranks
    )
    assert all(text in message for message in texts(outcomes, UsageError))
