"""Reads ranges of tensors from a checkpoint, whatever pieces they were saved in. One process; nothing is exchanged."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from typing_extensions import override

from unidist.buffer import Buffer
from unidist.checkpoint.format.index import Index, StoredPiece, StoredTensor
from unidist.checkpoint.format.interface import SavedSection
from unidist.checkpoint.format.parts import Part, Run, runs
from unidist.checkpoint.format.pieces import SLOT, TensorInfo
from unidist.checkpoint.format.shard import Entry, Shard
from unidist.errors import CheckpointError

_log = logging.getLogger("unidist")

Convert = Callable[[Buffer, Buffer], None]
"""Writes floating-point numbers in another type: `Framework.convert`."""

FIT = "Build the model that was saved, or give a mapping of names"
"""What can be done about a checkpoint that does not fit, for messages."""

_MAX_LISTED = 8
_AGAIN = "Copy the checkpoint again, or load an earlier one."


class Checkpoint:
    """A complete checkpoint that is being read; use it in a `with` statement. Reads ranges, one thread at a time.

    Args:
        folder: where its index is, see `directory.find`.
        convert: converts types; without it, what is read must be of the type that was saved.
        report: warns of what differs where that is allowed.

    Raises:
        CheckpointError: the index is missing, damaged, or of another version.
    """

    def __init__(
        self, folder: Path, *, convert: Convert | None = None, report: Callable[[str], None] = _log.warning
    ) -> None:
        self.folder = folder
        self.index = Index.read(folder)
        self.convert = convert
        self.report = report
        self._shards: dict[int, Shard] = {}
        self._chunk: tuple[StoredPiece, int] | None = None  # the last one that was read, and checked
        self._memory = bytearray()

    def section(self, name: str) -> SavedSection:
        """Return a section.

        Raises:
            CheckpointError: there is none of this name.
        """
        if name not in self.index.sections:
            listed = ", ".join(sorted(self.index.sections)) or "none"
            raise CheckpointError(
                f"the checkpoint {self.folder} has no section {name!r} (it has: {listed}). Save it too, or do not "
                "load it."
            )
        return Section(self, name)

    def read(self, tensor: StoredTensor, part: Part, target: Buffer) -> None:
        """Fill `target`, of the tensor's type, with the elements of `part`."""
        for piece in tensor.pieces:
            for run in runs(part, piece.part):
                self._copy_run(tensor, piece, run, target)

    def entry(self, tensor: StoredTensor, piece: StoredPiece) -> tuple[Shard, Entry]:
        """Return where a piece lies.

        Raises:
            CheckpointError: the shard is missing or damaged, or does not have it.
        """
        shard = self._shards.get(piece.shard)
        if shard is None:
            name, nbytes = self.index.shards[piece.shard]
            shard = Shard(self.folder / name)
            found = shard.path.stat().st_size
            if found != nbytes:
                shard.close()
                raise CheckpointError(
                    f"the shard {shard.path} is damaged, or of another checkpoint: it has {found} bytes, and the index "
                    f"says {nbytes}. {_AGAIN}"
                )
            self._shards[piece.shard] = shard
        entry = shard.entries.get(piece.key)
        if entry is None or entry.nbytes != piece.part.count * tensor.info.dtype.itemsize:
            raise CheckpointError(f"the shard {shard.path} does not have {piece.key!r} as the index says it. {_AGAIN}")
        return shard, entry

    def check(self, tensor: StoredTensor, piece: StoredPiece) -> None:
        """Read a whole piece and raise CheckpointError if it is damaged."""
        for chunk in range(len(piece.checksums)):
            self._load(tensor, piece, chunk)

    def close(self) -> None:
        """Close all files. Idempotent."""
        while self._shards:
            self._shards.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _copy_run(self, tensor: StoredTensor, piece: StoredPiece, run: Run, target: Buffer) -> None:
        item, size = tensor.info.dtype.itemsize, self.index.chunk_bytes
        view = target.bytes()
        done, stop = run.source * item, (run.source + run.count) * item
        offset = (run.target - run.source) * item  # from the piece's bytes to the target's
        while done < stop:
            chunk = done // size
            data = self._load(tensor, piece, chunk)
            end = min(stop, (chunk + 1) * size)
            view[offset + done : offset + end] = data[done - chunk * size : end - chunk * size]
            done = end

    def _load(self, tensor: StoredTensor, piece: StoredPiece, chunk: int) -> memoryview:
        """Return a chunk of a piece, checked; it stays valid until the next one is read."""
        shard, entry = self.entry(tensor, piece)
        size = self.index.chunk_bytes
        nbytes = min(size, entry.nbytes - chunk * size)
        if len(self._memory) < nbytes:
            self._memory = bytearray(nbytes)
        data = memoryview(self._memory)[:nbytes]
        if self._chunk is None or self._chunk[0] is not piece or self._chunk[1] != chunk:
            self._chunk = None
            shard.read(entry.offset + chunk * size, data)
            if zlib.crc32(data) != piece.checksums[chunk]:
                raise CheckpointError(
                    f"the shard {shard.path} is damaged: bytes {chunk * size} to {chunk * size + nbytes} of "
                    f"{piece.key!r} (tensor {tensor.info}) do not fit their checksum. {_AGAIN}"
                )
            self._chunk = (piece, chunk)
        return data


class Section(SavedSection):
    """A section of a checkpoint that is being read; see `SavedSection`."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._stored = checkpoint.index.sections[name]
        self.values = self._stored.values

    @property
    @override
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: tensor.info for name, tensor in self._stored.tensors.items()}

    @override
    def read(self, name: str, part: Part, target: Buffer) -> None:
        tensor = self._stored.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"section {self._name!r} of {self._checkpoint.folder} has no tensor {name!r}")
        if not part.fits(tensor.info.shape) or target.count != part.count:
            raise CheckpointError(
                f"{part.count} elements of the box {part.box} of {tensor.info} of {self._checkpoint.folder} were asked "
                f"for, to be put into {target.count} elements"
            )
        read_as(tensor.info, target, lambda raw: self._checkpoint.read(tensor, part, raw), self._checkpoint.convert)

    @override
    def match(self, wanted: Collection[TensorInfo], *, strict: bool = True) -> list[TensorInfo]:
        return match(
            f"section {self._name!r} of {self._checkpoint.folder}",
            self.tensors,
            wanted,
            strict=strict,
            report=self._checkpoint.report,
            elsewhere=self.elsewhere,
        )


def read_as(info: TensorInfo, target: Buffer, read: Callable[[Buffer], None], convert: Convert | None) -> None:
    """Read into `target` directly, or through memory of the saved type where it is of another floating-point type.

    Raises:
        CheckpointError: the types cannot be converted.
    """
    if target.dtype is info.dtype:
        read(target)
        return
    if convert is None or not (target.dtype.is_floating and info.dtype.is_floating):
        raise CheckpointError(
            f"{info} was saved, and it is {target.dtype} here: only floating-point types are converted. Use the type "
            "that was saved."
        )
    raw = Buffer.allocate(target.count, info.dtype)
    read(raw)
    convert(raw, target)


def match(
    what: str,
    there: Mapping[str, TensorInfo],
    wanted: Collection[TensorInfo],
    *,
    strict: bool,
    report: Callable[[str], None],
    elsewhere: Collection[str] = (),
    advice: str = FIT,
) -> list[TensorInfo]:
    """Check names and shapes as `SavedSection.match` does; `what` names the section in messages, `advice` ends them."""
    names = {info.name for info in wanted}
    names |= {name for name in there if name in elsewhere or name.rpartition(SLOT)[0] in elsewhere}
    missing = [str(info) for info in wanted if info.name not in there]
    unexpected = [str(info) for name, info in there.items() if name not in names]
    both = [info for info in wanted if info.name in there]
    shapes = [f"{there[info.name]}, here {list(info.shape)}" for info in both if there[info.name].shape != info.shape]
    problems = [
        f"{title} ({len(listed)}): {'; '.join(listed[:_MAX_LISTED])}{'; ...' if len(listed) > _MAX_LISTED else ''}"
        for title, listed in (
            ("it lacks", missing),
            ("it has what is not wanted", unexpected),
            ("of another shape", shapes),
        )
        if listed
    ]
    if shapes or (problems and strict):
        hint = "" if shapes else " With strict=False what both have is loaded."
        raise CheckpointError(f"{what} does not fit: {'. '.join(problems)}. {advice}.{hint}")
    if problems:
        report(f"{what} fits in part: {'. '.join(problems)}. What both have is loaded (strict=False).")
    return both
