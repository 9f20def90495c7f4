"""Converts checkpoints to other files, and other folders to checkpoints. One process; imports no framework."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from unidist.buffer import Buffer
from unidist.checkpoint.format.interface import MemoryState, SavedSection
from unidist.checkpoint.format.mapping import NameMapping, mapped_section
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.checkpoint.format.reader import Checkpoint
from unidist.checkpoint.format.shard import write_shard
from unidist.checkpoint.save_request import SaveOptions
from unidist.checkpoint.saving import Saver
from unidist.engines.single import SingleCommunicator


class Export(Protocol):
    """Writes a section of a checkpoint to a file of another format. An adapter names its own in its `FrameworkSpec`."""

    def __call__(self, checkpoint: Path, output: Path, *, section: str, mapping: NameMapping, model: str) -> None:
        """Write the file.

        Args:
            checkpoint: folder of a complete checkpoint.
            output: the file; one that is there is replaced.
            section: what to write ("model").
            mapping: names and orders of dims in the file for those of the checkpoint.
            model: "module:function" that returns the model, where the format needs one; "" if it was not given.

        Raises:
            UnidistError: the format needs a model, the section does not fit it, the checkpoint is damaged.
        """


class Import(Protocol):
    """Reads a folder of another format. An adapter names its own in its `FrameworkSpec`."""

    def __call__(self, folder: Path) -> dict[str, MemoryState]:
        """Return the sections that a checkpoint shall have."""


def read_whole(section: SavedSection, info: TensorInfo) -> Buffer:
    """Return a copy of a whole tensor of a section."""
    memory = Buffer.allocate(info.count, info.dtype)
    section.read(info.name, Part.whole(info.shape), memory)
    return memory


def to_safetensors(checkpoint: Path, output: Path, *, section: str, mapping: NameMapping, model: str = "") -> None:
    """Write a section as one safetensors file; see `Export`. The tensors are in memory meanwhile."""
    with Checkpoint(checkpoint) as opened:
        found = mapped_section(opened, section, mapping)
        tensors = {name: (info.shape, read_whole(found, info)) for name, info in found.tensors.items()}
    write_shard(output, tensors, {"format": "pt"})


def to_checkpoint(path: Path, sections: dict[str, MemoryState], facts: dict[str, object]) -> None:
    """Write sections as a checkpoint, from this process alone."""
    saver = Saver(SingleCommunicator(), {"world_size": 1, "strategy": "", **facts})
    saver.save(SaveOptions(path), lambda: sections, {}).wait()


def state_of_tensors(tensors: dict[str, tuple[tuple[int, ...], Buffer]]) -> MemoryState:
    """Return whole tensors as a section."""
    return MemoryState([Piece.whole(name, shape, memory) for name, (shape, memory) in tensors.items()])
