"""The index of a checkpoint, `index.json`, written last: the contents of each shard, and everything but tensors."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unidist.buffer import DType
from unidist.checkpoint.format.parts import Box, Part
from unidist.checkpoint.format.pieces import TensorInfo
from unidist.checkpoint.format.shard import advice
from unidist.errors import CheckpointError, UsageError

NAME = "index.json"
FORMAT = "unidist-checkpoint"
VERSION = 1
CHUNK_BYTES = 4 << 20
"""Bytes of a piece per checksum: the least that has to be read to verify a range of it."""


@dataclass(frozen=True)
class StoredPiece:
    """The position of a piece in a shard.

    Args:
        shard: number of the file.
        key: name of the tensor in that file.
        part: which elements.
        checksums: CRC-32 of every chunk.
    """

    shard: int
    key: str
    part: Part
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, and where its pieces are."""

    info: TensorInfo
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True)
class StoredSection:
    """A model, an optimizer or another part of a checkpoint.

    Args:
        values: plain values.
        tensors: by name.
    """

    values: dict[str, Any]
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True)
class Index:
    """All of a checkpoint but the elements of its tensors.

    Args:
        sections: by name ("model", "optimizer").
        shards: names of the files, and their sizes in bytes.
        facts: the version that wrote it, the time, the number of ranks, the strategies and the step.
        chunk_bytes: number of bytes per checksum.
    """

    sections: dict[str, StoredSection]
    shards: tuple[tuple[str, int], ...]
    facts: dict[str, Any] = field(default_factory=dict)
    chunk_bytes: int = CHUNK_BYTES

    def pieces(self) -> Iterator[tuple[str, StoredTensor, StoredPiece]]:
        """Yield every piece, with its section and tensor."""
        for name, section in self.sections.items():
            for tensor in section.tensors.values():
                for piece in tensor.pieces:
                    yield name, tensor, piece

    def to_json(self) -> str:
        """Return the text of the file; it carries a checksum of itself."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "facts": self.facts,
            "chunk_bytes": self.chunk_bytes,
            "shards": [{"name": name, "bytes": nbytes} for name, nbytes in self.shards],
            "sections": {
                name: {
                    "values": section.values,
                    "tensors": {key: _tensor_to_json(tensor) for key, tensor in section.tensors.items()},
                }
                for name, section in self.sections.items()
            },
        }
        body = _canonical(content)
        return f'{{"checksum": {zlib.crc32(body.encode())}, "index": {body}}}\n'

    @classmethod
    def from_json(cls, text: str | bytes, path: Path) -> Index:
        """Return the index that a text says.

        Args:
            text: what `to_json` made.
            path: where it was read, for messages.

        Raises:
            CheckpointError: it is damaged, of another version, or no index.
        """
        try:
            outer = json.loads(text)
            content, checksum = outer["index"], outer["checksum"]
        except (ValueError, KeyError, TypeError) as exc:
            raise _damaged(path, f"it cannot be read ({exc!r})") from exc
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise CheckpointError(f"{path} is no index of a unidist checkpoint. Give the folder that `save` wrote.")
        if content.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has format version {content.get('version')!r}, and this unidist reads version {VERSION}. "
                "Load it with the release of unidist that wrote it, or a newer one."
            )
        if zlib.crc32(_canonical(content).encode()) != checksum:
            raise _damaged(path, "its checksum does not fit its content")
        try:
            return cls(
                {name: _section_from_json(section) for name, section in content["sections"].items()},
                tuple((str(shard["name"]), int(shard["bytes"])) for shard in content["shards"]),
                content["facts"],
                content["chunk_bytes"],
            )
        except (KeyError, TypeError, ValueError, AttributeError, UsageError) as exc:
            raise _damaged(path, f"it is malformed ({exc!r})") from exc

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Return the index of the checkpoint in a folder.

        Raises:
            CheckpointError: it is not there, may not be read, is damaged, or is of another version.
        """
        path = folder / NAME
        try:
            return cls.from_json(path.read_bytes(), path)
        except OSError as exc:
            raise CheckpointError(f"the index {path} cannot be read: {exc.strerror}. {advice(exc)}") from exc


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _tensor_to_json(tensor: StoredTensor) -> dict[str, Any]:
    pieces = []
    for piece in tensor.pieces:
        entry: dict[str, Any] = {"shard": piece.shard, "key": piece.key, "checksums": list(piece.checksums)}
        if not piece.part.is_whole(tensor.info.shape):
            entry |= {"box": [list(dim) for dim in piece.part.box], "range": [piece.part.start, piece.part.stop]}
            if piece.part.more:
                entry["more"] = [[list(dim) for dim in box] for box in piece.part.more]
        pieces.append(entry)
    return {"shape": list(tensor.info.shape), "dtype": str(tensor.info.dtype), "pieces": pieces}


def _section_from_json(content: dict[str, Any]) -> StoredSection:
    return StoredSection(
        dict(content["values"]), {name: _tensor_from_json(name, entry) for name, entry in content["tensors"].items()}
    )


def _tensor_from_json(name: str, content: dict[str, Any]) -> StoredTensor:
    info = TensorInfo(name, tuple(map(int, content["shape"])), DType(content["dtype"]))
    pieces = []
    for entry in content["pieces"]:
        part = Part.whole(info.shape)
        if "box" in entry:
            start, stop = map(int, entry["range"])
            part = Part(_box(entry["box"]), start, stop, tuple(_box(box) for box in entry.get("more", ())))
        if not part.fits(info.shape):
            raise ValueError(f"a piece of {name!r} lies outside of it")
        pieces.append(StoredPiece(int(entry["shard"]), str(entry["key"]), part, tuple(entry["checksums"])))
    if sum(piece.part.count for piece in pieces) != info.count:
        raise ValueError(f"the pieces of {name!r} do not cover it")
    return StoredTensor(info, tuple(pieces))


def _box(content: list[list[int]]) -> Box:
    return tuple((int(low), int(high)) for low, high in content)


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the index {path} is damaged: {what}. Copy the checkpoint again, or load an earlier one.")
