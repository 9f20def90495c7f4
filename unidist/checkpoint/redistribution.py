"""Moves the values of a model to other ranks, or to another division of the model, without a disk.

As in a checkpoint, states say which pieces of which tensors each rank has. Ranks exchange what they lack, in rounds of
limited size. `redistribute_job` is `redistribute` of the facades.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unidist.buffer import Buffer
from unidist.checkpoint.agreement import agree
from unidist.checkpoint.fetched_section import FetchedSection
from unidist.checkpoint.format.interface import KeepsState, MemoryState, SavedSection, kept_state
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.checkpoint.format.reader import Convert
from unidist.checkpoint.format.writing import Identity, RankInventory, check_inventories, merge_values
from unidist.checkpoint.framework_states import FrameworkStates
from unidist.checkpoint.loading import check_parts
from unidist.checkpoint.saving import plain
from unidist.checkpoint.transfers import Transfer, Wanted, move, transfers
from unidist.communicator import Communicator, format_ranks
from unidist.errors import CheckpointError, UsageError
from unidist.negotiation.process_sets import ProcessSet
from unidist.runtime import context

_log = logging.getLogger("unidist")

ROUND_BYTES = 64 << 20
"""About how much a rank gives and takes in one round. A tensor that is larger has a round for itself."""

_SECTION = "model"
_WHAT = "the model cannot be redistributed"
_ADVICE = "Give models with the same names and shapes"
_TO = (
    "Give the model that takes the values, or None on a rank that takes none; or on every rank the ranks that get the "
    "whole model: a list of ranks, or a process set. For another strategy distribute a second model with it, and give "
    "that"
)


@dataclass(frozen=True)
class RedistributionRequest:
    """What a rank asks for, equal on every rank.

    Args:
        ranks: that get the whole model; None: each rank gives the model that takes the values, or None.
        strict: a tensor that only one of the models has is an error.
    """

    ranks: tuple[int, ...] | None
    strict: bool = True

    def __str__(self) -> str:
        to = "a model" if self.ranks is None else f"ranks {format_ranks(self.ranks)}"
        return f"to {to} with strict={self.strict}"


State = Callable[[], KeepsState | None]
"""Makes the state of a model on this rank; None: the rank has none. It may raise."""


def redistribute(
    communicator: Communicator,
    ask: Callable[[], RedistributionRequest],
    source: State,
    target: State,
    *,
    convert: Convert | None,
    report: Callable[[str], None] = _log.warning,
) -> tuple[dict[str, tuple[TensorInfo, Buffer]], dict[str, Any]] | None:
    """Give a model the values of another one. Collective. Changes no rank unless the models fit on all.

    Args:
        communicator: over all ranks.
        ask: returns the request, equal on every rank; it may raise.
        source: the model that has the values, however it is divided. Ranks hold equal pieces or disjoint ones.
        target: the model that takes them; not called where ranks get the whole model. Called for each round, since a
            load may replace the arrays of a model.
        convert: converts floating-point types.
        report: warns of tensors that are left out with `strict=False`.

    Returns:
        On ranks that get the whole model, its tensors in new memory, by name, and its plain values. Else None.

    Raises:
        CheckpointError: the models do not fit; an error of another rank.
        UsageError: the ranks ask for different things.
    """
    error: Exception | None = None
    request, pieces, inventory = None, dict[Identity, Piece](), None
    try:
        request = _checked(ask(), communicator.size)
        state = source()
        if state is not None:
            held = [piece for piece in state.pieces() if piece.part.count or not piece.tensor.count]
            pieces = {(_SECTION, piece.tensor, piece.part): piece for piece in held}
            inventory = RankInventory(tuple(pieces), {_SECTION: plain(state.values(), _SECTION)})
    except Exception as exc:  # of whatever kind: the others must hear of it
        error = exc
    gathered = agree(communicator, (request, inventory), error, _WHAT)
    _check_requests([asked for asked, _ in gathered], [each is not None for _, each in gathered])
    inventories: list[RankInventory] = [each or RankInventory((), {}) for _, each in gathered]
    check_inventories(inventories)
    holders: dict[Identity, list[int]] = {}
    for rank, held_there in enumerate(inventories):
        for identity in held_there.pieces:
            holders.setdefault(identity, []).append(rank)
    values = merge_values([each.values for each in inventories]).get(_SECTION, {})
    tensors = {info.name: info for _, info, _ in holders}

    def section(names: Collection[str]) -> FetchedSection:
        there = {name: tensors[name] for name in names}
        what = "the model that is redistributed"
        return FetchedSection(_SECTION, there, values, convert, what=what, advice=_ADVICE, report=report)

    assert request is not None
    ranks = request.ranks
    takes = target if ranks is None else functools.cache(lambda: _whole(tensors, communicator.rank in ranks))
    wants = _wanted(communicator, takes, section(tensors), request)
    for names, chosen in _rounds(transfers(holders, wants), communicator.size, tensors):
        memory: dict[Identity, Buffer] = {}
        fetched: dict[Wanted, Buffer] = {}
        try:
            if error is None:
                given = dict.fromkeys(each.piece for each in chosen if each.giver == communicator.rank)
                memory = {identity: pieces[identity].memory for identity in given}
                fetched = _targets(
                    chosen, [each for each in wants[communicator.rank] if each[1] in names], memory, tensors
                )
        except Exception as exc:
            error = exc
        agree(communicator, None, error, _WHAT)  # also of the round before: nobody waits for a rank that gave up
        move(communicator, [each for each in chosen if not _is_there(each)], memory.__getitem__, fetched)
        try:
            taker = takes()
            if taker is not None:
                part = section(names)
                part.give(fetched)
                taker.load(part, strict=False)
        except Exception as exc:
            error = exc
    agree(communicator, None, error, _WHAT)
    taken = None if ranks is None else takes()
    if taken is None:
        return None
    return {piece.tensor.name: (piece.tensor, piece.memory) for piece in taken.pieces()}, values


def redistribute_job(
    states: FrameworkStates, model: Any, to: Any, *, strict: bool
) -> tuple[dict[str, tuple[TensorInfo, Buffer]], dict[str, Any]] | None:
    """Redistribute a model; `redistribute` of the facades documents the arguments, `redistribute` the result."""
    runtime = context.current()
    report = _log.warning if runtime.topology.rank == 0 else _log.debug

    def state_of(value: Any) -> KeepsState | None:
        return None if value is None else kept_state(value) or states.model(value)

    def check(value: Any, found: str) -> None:
        if value is not None and kept_state(value) is None and not states.framework.is_model(value):
            raise UsageError(f"redistribute(): {type(value).__name__} is no model of {states.framework.name}{found}")

    def ask() -> RedistributionRequest:
        check(model, "")
        ranks = ranks_of(to)
        if ranks is None:
            check(to, f", and no ranks. {_TO}")
        return RedistributionRequest(ranks, strict)

    return redistribute(
        runtime.owned(_Link).communicator,
        ask,
        lambda: state_of(model),
        lambda: state_of(to),
        convert=states.framework.convert,
        report=report,
    )


class _Link:
    """The communicator of redistributions; a checkpoint may be on its way to the disk meanwhile."""

    def __init__(self, runtime: context.Context) -> None:
        self.communicator = runtime.duplicate_world()

    def close(self) -> None:
        """Give it back."""
        self.communicator.close()


def ranks_of(to: Any) -> tuple[int, ...] | None:
    """Return the ranks that `to` names, a process set or a list of ranks; None: it is something else."""
    found = to.ranks if isinstance(to, ProcessSet) else to
    if not isinstance(found, list | tuple | set | frozenset | range) or not found:
        return None
    return tuple(sorted(set(found))) if all(type(rank) is int for rank in found) else None


def _checked(request: RedistributionRequest, size: int) -> RedistributionRequest:
    wrong = [rank for rank in request.ranks or () if not 0 <= rank < size]
    if wrong:
        raise UsageError(f"redistribute(to=) names rank {wrong[0]}; choices: 0 to {size - 1}")
    return request


def _check_requests(requests: Sequence[RedistributionRequest], gives: Sequence[bool]) -> None:
    for rank, request in enumerate(requests):
        if request != requests[0]:
            raise UsageError(
                f"the ranks redistribute differently: {requests[0]} on rank 0, {request} on rank {rank}. Give the "
                "same ranks on all of them, or a model or None on each"
            )
    if not any(gives):
        raise UsageError("redistribute(): the model is None on every rank, so there is nothing to redistribute")


def _whole(tensors: Mapping[str, TensorInfo], is_taker: bool) -> MemoryState | None:
    if not is_taker:
        return None
    return MemoryState(
        [Piece.whole(info.name, info.shape, Buffer.allocate(info.count, info.dtype)) for info in tensors.values()]
    )


def _wanted(
    communicator: Communicator, target: State, section: FetchedSection, request: RedistributionRequest
) -> list[list[Wanted]]:
    """Check that the models fit on all ranks; return what each of them wants. Collective."""
    state, error = None, None
    parts: dict[str, tuple[KeepsState, SavedSection]] = {}
    names: dict[str, frozenset[str]] = {}
    try:
        state = target()
        if state is not None:
            parts, names = {_SECTION: (state, section)}, {_SECTION: frozenset(state.names())}
    except Exception as exc:
        error = exc
    check_parts(communicator, parts, names, error, strict=request.strict, what=_WHAT)
    wanted: list[Wanted] | None = None
    try:
        wanted = None if state is None else list(_parts_of(state, section, communicator.rank))
    except Exception as exc:
        error = exc
    found: list[list[Wanted] | None] = agree(communicator, wanted, error, _WHAT)
    if all(each is None for each in found):
        raise UsageError("redistribute(): `to` is None on every rank, so nobody takes the model")
    return [each or [] for each in found]


def _parts_of(state: KeepsState, section: FetchedSection, rank: int) -> Iterator[Wanted]:
    """Yield what a state will read of the section."""
    for info, part in dict.fromkeys((piece.tensor, piece.part) for piece in state.pieces()):
        there = section.tensors.get(info.name)
        if there is None or not part.count:
            continue
        if info.dtype is not there.dtype and not (info.dtype.is_floating and there.dtype.is_floating):
            raise CheckpointError(
                f"{there} would become {info} on rank {rank}: only floating-point types are converted. {_ADVICE}"
            )
        yield _SECTION, info.name, part


def _rounds(
    chosen: Sequence[Transfer], num_ranks: int, tensors: Mapping[str, TensorInfo]
) -> Iterator[tuple[list[str], list[Transfer]]]:
    """Yield the names of each round with their transfers, the same on every rank."""
    by_name: dict[str, list[Transfer]] = {name: [] for name in tensors}
    for each in chosen:
        by_name[each.wanted[1]].append(each)
    names: list[str] = []
    nbytes = [0] * (2 * num_ranks)
    for name, moved in by_name.items():
        own = [0] * len(nbytes)
        for each in moved:
            own[each.taker] += each.max_nbytes
            own[num_ranks + each.giver] += each.max_nbytes
        if names and any(before + now > ROUND_BYTES for before, now in zip(nbytes, own, strict=True)):
            yield names, [each for one in names for each in by_name[one]]
            names, nbytes = [], [0] * len(nbytes)
        names.append(name)
        nbytes = [before + now for before, now in zip(nbytes, own, strict=True)]
    yield names, [each for one in names for each in by_name[one]]  # without tensors, too: there may be plain values


def _is_there(transfer: Transfer) -> bool:
    """Return whether a rank has all of what it wants itself, in one piece: that is read without a copy."""
    return transfer.giver == transfer.taker and transfer.is_all


def _targets(
    chosen: Sequence[Transfer],
    wanted: Sequence[Wanted],
    memory: Mapping[Identity, Buffer],
    tensors: Mapping[str, TensorInfo],
) -> dict[Wanted, Buffer]:
    """Return memory for what this rank wants in a round: that of its piece, or new memory."""
    own = {each.wanted: memory[each.piece] for each in chosen if _is_there(each) and each.piece in memory}
    return {
        each: own[each] if each in own else Buffer.allocate(each[2].count, tensors[each[1]].dtype) for each in wanted
    }
