"""Taking over a committed state from the ranks that hold its pieces, whatever number of ranks it is divided for now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unidist.buffer import Buffer, DType, copy
from unidist.checkpoint.agreement import agree
from unidist.checkpoint.format.interface import KeepsState
from unidist.checkpoint.format.pieces import TensorInfo
from unidist.checkpoint.format.reader import Convert
from unidist.checkpoint.format.writing import Identity, merge_values
from unidist.checkpoint.loading import check_parts
from unidist.communicator import Communicator
from unidist.elastic.peer.section import PeerSection
from unidist.elastic.peer.transfers import Transfer, Wanted, missing, places, transfers
from unidist.errors import StateLostError

_LOAD = "the committed state cannot be taken over"


@dataclass(frozen=True)
class HoldingIndex:
    """The index of a holding.

    Args:
        pieces: what they are.
        values: the plain values of the rank that had it, by section.
    """

    pieces: tuple[Identity, ...]
    values: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class HeldPieces(HoldingIndex):
    """The pieces that one rank had at a commit.

    Args:
        memory: of the pieces, at the offsets that `places` gives.
    """

    memory: Buffer


def take_over(
    communicator: Communicator,
    holdings: Mapping[int, HoldingIndex],
    holders: Mapping[int, Sequence[int]],
    own: Mapping[int, HeldPieces],
    states: Mapping[str, KeepsState],
    *,
    convert: Convert | None,
    is_whole: bool = True,
) -> None:
    """Load states from what ranks hold. Collective.

    Args:
        communicator: over all ranks.
        holdings: what is in the holding of each origin, equal on every rank.
        holders: the ranks that have it.
        own: the holdings that this rank has.
        states: what to load into, by section.
        convert: converts types.
        is_whole: the holdings are all that there was, so what is wanted must fit it.

    Raises:
        StateLostError: something that is wanted is in no holding.
        UnidistError: it does not fit, on this or another rank.
    """
    indices = {origin: held.pieces for origin, held in holdings.items()}
    merged = merge_values([holdings[origin].values for origin in sorted(holdings)])
    tensors: dict[str, dict[str, TensorInfo]] = {name: {} for name in states}
    for pieces in indices.values():
        for name, info, _ in pieces:
            tensors[name][info.name] = info
    sections = {name: PeerSection(name, tensors[name], merged.get(name, {}), convert) for name in states}
    parts = {name: (state, sections[name]) for name, state in states.items()}
    if is_whole:
        names = {name: frozenset(state.names()) for name, state in states.items()}
        check_parts(communicator, parts, names, None, strict=True, what=_LOAD)
    error = _read(states, sections)
    wants: list[list[Wanted]] = agree(
        communicator, [wanted for section in sections.values() for wanted in section.wanted], error, _LOAD
    )
    chosen = transfers(indices, holders, wants)
    for rank, wanted in enumerate(wants):
        lacking = missing(wanted, [each for each in chosen if each.taker == rank])
        if lacking:
            raise StateLostError(f"{_LOAD}: nobody has all of {lacking[0][1]!r} of section {lacking[0][0]!r}")
    itself = {wanted: info for section in sections.values() for wanted, info in section.wanted.items()}
    fetched = _fetch(communicator, chosen, own, wants, itself)
    for section in sections.values():
        section.give(fetched)
    agree(communicator, None, _read(states, sections), _LOAD)


def _read(states: Mapping[str, KeepsState], sections: Mapping[str, PeerSection]) -> Exception | None:
    """Let each state load; returns what went wrong."""
    try:
        for name, state in states.items():
            state.load(sections[name], strict=True)
    except Exception as exc:  # of whatever kind: the others must hear of it
        return exc
    return None


def _fetch(
    communicator: Communicator,
    chosen: Sequence[Transfer],
    holdings: Mapping[int, HeldPieces],
    wants: Sequence[Sequence[Wanted]],
    wanted: Mapping[Wanted, TensorInfo],
) -> dict[Wanted, Buffer]:
    """Move what was chosen; returns what this rank wanted. Collective."""
    rank, ranks = communicator.rank, range(communicator.size)
    offsets = {origin: places(held.pieces)[0] for origin, held in holdings.items()}

    def given(each: Transfer) -> Buffer:
        begin = offsets[each.origin][each.piece] + each.run.source * each.itemsize
        return holdings[each.origin].memory.slice(begin, each.nbytes)

    memory = {each: Buffer.allocate(each[2].count, info.dtype) for each, info in wanted.items()}

    def taken(each: Transfer) -> Buffer:
        whole = memory[wants[rank][each.wanted]].cast(DType.UINT8)
        return whole.slice(each.run.target * each.itemsize, each.nbytes)

    outgoing = [[each for each in chosen if each.giver == rank != each.taker == other] for other in ranks]
    incoming = [[each for each in chosen if each.taker == rank != each.giver == other] for other in ranks]
    source = Buffer.of(bytearray(b"".join(given(each).bytes() for row in outgoing for each in row)))
    send_counts = [sum(each.nbytes for each in row) for row in outgoing]
    receive_counts = [sum(each.nbytes for each in row) for row in incoming]
    target = Buffer.allocate(sum(receive_counts), DType.UINT8)
    communicator.alltoall(source, target, send_counts=send_counts, receive_counts=receive_counts).wait()
    start = 0
    for each in [each for row in incoming for each in row]:
        copy(target.slice(start, each.nbytes), taken(each))
        start += each.nbytes
    for each in chosen:
        if each.giver == each.taker == rank:
            copy(given(each), taken(each))
    return memory
