"""Taking over a committed state from the ranks that hold its pieces, whatever number of ranks it is divided for now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unidist.buffer import Buffer
from unidist.checkpoint.agreement import agree
from unidist.checkpoint.fetched_section import FetchedSection
from unidist.checkpoint.format.interface import KeepsState
from unidist.checkpoint.format.pieces import TensorInfo
from unidist.checkpoint.format.reader import Convert
from unidist.checkpoint.format.writing import Identity, merge_values
from unidist.checkpoint.loading import check_parts
from unidist.checkpoint.transfers import Wanted, missing, move, transfers
from unidist.communicator import Communicator
from unidist.elastic.peer.transfers import places
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
    merged = merge_values([holdings[origin].values for origin in sorted(holdings)])
    tensors: dict[str, dict[str, TensorInfo]] = {name: {} for name in states}
    having: dict[Identity, set[int]] = {}
    for origin in sorted(holdings):
        for identity in holdings[origin].pieces:
            tensors[identity[0]][identity[1].name] = identity[1]
            having.setdefault(identity, set()).update(holders[origin])
    sections = {
        name: FetchedSection(
            name, tensors[name], merged.get(name, {}), convert, what=f"section {name!r} of the committed state"
        )
        for name in states
    }
    parts = {name: (state, sections[name]) for name, state in states.items()}
    if is_whole:
        names = {name: frozenset(state.names()) for name, state in states.items()}
        check_parts(communicator, parts, names, None, strict=True, what=_LOAD)
    error = _read(states, sections)
    wants: list[list[Wanted]] = agree(
        communicator, [wanted for section in sections.values() for wanted in section.wanted], error, _LOAD
    )
    chosen = transfers(having, wants)
    for rank, wanted in enumerate(wants):
        lacking = missing(wanted, [each for each in chosen if each.taker == rank])
        if lacking:
            raise StateLostError(f"{_LOAD}: nobody has all of {lacking[0][1]!r} of section {lacking[0][0]!r}")
    fetched = {
        wanted: Buffer.allocate(wanted[2].count, info.dtype)
        for section in sections.values()
        for wanted, info in section.wanted.items()
    }
    move(communicator, chosen, _memory(own).__getitem__, fetched)
    for section in sections.values():
        section.give(fetched)
    agree(communicator, None, _read(states, sections), _LOAD)


def _read(states: Mapping[str, KeepsState], sections: Mapping[str, FetchedSection]) -> Exception | None:
    """Let each state load; returns what went wrong."""
    try:
        for name, state in states.items():
            state.load(sections[name], strict=True)
    except Exception as exc:  # of whatever kind: the others must hear of it
        return exc
    return None


def _memory(holdings: Mapping[int, HeldPieces]) -> dict[Identity, Buffer]:
    """Return the memory of each piece that this rank has, as bytes."""
    found: dict[Identity, Buffer] = {}
    for _, held in sorted(holdings.items()):
        for identity, offset in zip(held.pieces, places(held.pieces)[0], strict=True):
            nbytes = identity[2].count * identity[1].dtype.itemsize
            found.setdefault(identity, held.memory.slice(offset, nbytes))
    return found
