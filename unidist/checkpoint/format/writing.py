"""Decides which rank writes which piece, and makes the index of all shards. Only `write` does I/O; no communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidist.buffer import Buffer
from unidist.checkpoint.format import index, shard
from unidist.checkpoint.format.index import Index, StoredPiece, StoredSection, StoredTensor
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.errors import CheckpointError

Identity = tuple[str, TensorInfo, Part]
"""The identity of a piece: section, tensor and part. Pieces of equal identity hold the same elements."""


@dataclass(frozen=True)
class RankInventory:
    """A rank's description of its state, before anything is written.

    Args:
        pieces: that the rank holds.
        values: its plain values, by section.
    """

    pieces: tuple[Identity, ...]
    values: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class WrittenShard:
    """The shard that one rank has written.

    Args:
        name: of the file; "" if the rank had nothing to write.
        nbytes: size of the file.
        pieces: in the file, each with its key and checksums.
    """

    name: str
    nbytes: int
    pieces: tuple[tuple[Identity, str, tuple[int, ...]], ...]


def assign(inventories: Sequence[RankInventory]) -> list[list[int]]:
    """Choose the pieces that each rank writes: each distinct piece once, with about the same number of bytes per rank.

    Args:
        inventories: of all ranks.

    Returns:
        For each rank, the positions in its inventory of the pieces that it writes. The same on every rank.
    """
    holders: dict[Identity, list[tuple[int, int]]] = {}
    for rank, inventory in enumerate(inventories):
        for position, identity in enumerate(inventory.pieces):
            holders.setdefault(identity, []).append((rank, position))
    loads = [0] * len(inventories)
    chosen: list[list[int]] = [[] for _ in inventories]

    def nbytes(identity: Identity) -> int:
        return identity[2].count * identity[1].dtype.itemsize

    # Those without a choice first, then the largest first: what is left can even out.
    for identity in sorted(holders, key=lambda each: (len(holders[each]) > 1, -nbytes(each))):
        rank, position = min(holders[identity], key=lambda holder: (loads[holder[0]], holder[0]))
        loads[rank] += nbytes(identity)
        chosen[rank].append(position)
    return [sorted(positions) for positions in chosen]


def check_inventories(inventories: Sequence[RankInventory]) -> None:
    """Raise CheckpointError unless the pieces of all ranks cover every tensor exactly once."""
    tensors: dict[tuple[str, str], TensorInfo] = {}
    covered: dict[tuple[str, str], int] = {}
    for section, info, part in dict.fromkeys(identity for inventory in inventories for identity in inventory.pieces):
        known = tensors.setdefault((section, info.name), info)
        if known != info:
            raise CheckpointError(f"ranks describe one tensor of section {section!r} differently: {known} and {info}")
        covered[section, info.name] = covered.get((section, info.name), 0) + part.count
    for (section, name), count in covered.items():
        info = tensors[section, name]
        if count != info.count:
            raise CheckpointError(
                f"the pieces of {info} in section {section!r} have {count} elements together instead of {info.count}: "
                "the state's `pieces` does not cover the tensor, or covers some of it twice"
            )


def write(folder: Path, name: str, pieces: Sequence[tuple[str, Piece]]) -> WrittenShard:
    """Write pieces as one shard.

    Args:
        folder: where.
        name: of the file.
        pieces: each with its section.

    Raises:
        OSError: the disk refuses.
    """
    if not pieces:
        return WrittenShard("", 0, ())
    tensors: dict[str, tuple[tuple[int, ...], Buffer]] = {}
    described = []
    for section, piece in pieces:
        info, part = piece.tensor, piece.part
        key = f"{section}/{info.name}"
        shape = info.shape
        if not part.is_whole(shape):
            box = "+".join(",".join(f"{start}:{stop}" for start, stop in each) for each in part.boxes)
            key, shape = f"{key}[{box}][{part.start}:{part.stop}]", (part.count,)
        memory = piece.memory
        tensors[key] = (shape, memory)
        described.append(((section, info, part), key, tuple(shard.checksums(memory, index.CHUNK_BYTES))))
    path = folder / name
    shard.write_shard(path, tensors, {"format": index.FORMAT})
    return WrittenShard(name, path.stat().st_size, tuple(described))


def make_index(
    inventories: Sequence[RankInventory], written: Sequence[WrittenShard], facts: Mapping[str, Any]
) -> Index:
    """Return the index of what all ranks have written."""
    files = [each for each in written if each.name]
    pieces: dict[tuple[str, TensorInfo], list[StoredPiece]] = {}
    for number, each in enumerate(files):
        for (section, info, part), key, sums in each.pieces:
            pieces.setdefault((section, info), []).append(StoredPiece(number, key, part, sums))
    values = merge_values([inventory.values for inventory in inventories])
    sections = {name: StoredSection(values.get(name, {}), {}) for name in values}
    for (section, info), stored in pieces.items():
        stored.sort(key=lambda piece: (piece.part.box, piece.part.start))
        sections[section].tensors[info.name] = StoredTensor(info, tuple(stored))
    return Index(sections, tuple((each.name, each.nbytes) for each in files), dict(facts))


def merge_values(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the plain values of all ranks as one: dicts key by key, at any depth; the rest must be equal.

    Raises:
        CheckpointError: two ranks have different values under one key; names both.
    """
    merged: dict[str, Any] = {}
    for rank, own in enumerate(values):
        _merge(merged, own, rank, "")
    return merged


def _merge(merged: dict[str, Any], own: Mapping[str, Any], rank: int, path: str) -> None:
    for key, value in own.items():
        if isinstance(value, dict):
            target = merged.setdefault(key, {})
            if isinstance(target, dict):
                _merge(target, value, rank, f"{path}{key}.")
                continue
        known = merged.setdefault(key, value)
        if known != value and not (known != known and value != value):  # NaN equals itself here
            raise CheckpointError(
                f"the ranks' values differ: {path}{key} is {known!r} on an earlier rank and {value!r} on rank {rank}. "
                "Give every rank the same, or keep them under keys of their own."
            )
