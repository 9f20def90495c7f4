"""States for the tests: tensors of numbers that tell where they belong, cut up in any way; no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unidist.buffer import Buffer, DType
from unidist.checkpoint.format.interface import KeepsState, MemoryState
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.checkpoint.format.reader import Checkpoint
from unidist.checkpoint.loading import LoadOptions, load
from unidist.checkpoint.save_request import SaveOptions
from unidist.checkpoint.saving import Saver
from unidist.communicator import Communicator
from unidist.testing.threads import ThreadWorld

Array = np.ndarray[Any, Any]
SHAPES = {"table": (6, 5), "bias": (7,), "scalar": (), "empty": (0, 3), "cube": (2, 3, 4)}


def numbers(name: str, shape: Sequence[int], dtype: str = "float32") -> Array:
    """Return a tensor in which no two elements are equal; other names have other numbers."""
    count = int(np.prod(shape))
    return (np.arange(count) + 100 * len(name)).astype(dtype).reshape(shape)


def cut(array: Array, part: Part) -> Array:
    """Return the elements of a part, flat and in memory of their own."""
    box = array[tuple(slice(*dim) for dim in part.box)]
    return np.array(box.reshape(-1)[part.start : part.stop])


def piece(name: str, array: Array, part: Part | None = None) -> Piece:
    """Return a piece of an array, in memory of its own."""
    part = Part.whole(array.shape) if part is None else part
    return Piece(TensorInfo(name, array.shape, DType(array.dtype.name)), part, Buffer.of(cut(array, part)))


def flat_shares(rank: int, size: int) -> list[Piece]:
    """Return what a rank holds if every tensor is dealt out in flat ranges."""
    held = []
    for name, shape in SHAPES.items():
        count = int(np.prod(shape))
        bounds = [count * each // size for each in range(size + 1)]
        held.append(piece(name, numbers(name, shape), Part.flat(shape, bounds[rank], bounds[rank + 1])))
    return held


def columns(rank: int, size: int) -> list[Piece]:
    """Return what a rank holds if the last dim of every tensor is cut; scalars are everywhere."""
    held = []
    for name, shape in SHAPES.items():
        box = [(0, length) for length in shape]
        if shape:
            box[-1] = (shape[-1] * rank // size, shape[-1] * (rank + 1) // size)
        held.append(piece(name, numbers(name, shape), Part.of_box(tuple(box))))
    return held


def columns_in_ranges(rank: int, size: int) -> list[Piece]:
    """Return shares of two halves of the columns, each dealt out to half of the ranks: two ways of cutting at once."""
    half, other, groups = rank % 2, rank // 2, max(size // 2, 1)
    held = []
    for each in columns(half, 2 if size > 1 else 1):
        count = each.part.count
        part = each.part.range_within(count * other // groups, count * (other + 1) // groups)
        held.append(piece(each.tensor.name, numbers(each.tensor.name, each.tensor.shape), part))
    return held


def everything(rank: int, size: int) -> list[Piece]:
    """Return what a rank holds if all hold all."""
    return [piece(name, numbers(name, shape)) for name, shape in SHAPES.items()]


WAYS: dict[str, Callable[[int, int], list[Piece]]] = {
    "whole": everything,
    "flat": flat_shares,
    "columns": columns,
    "both": columns_in_ranges,
}


def save_from(
    size: int, path: Path, make: Callable[[int, int], Mapping[str, KeepsState]], **options: Any
) -> list[BaseException | None]:
    """Save from `size` ranks, each a thread; return what each one raised."""

    def main(communicator: Communicator) -> BaseException | None:
        saver = Saver(communicator, {"world_size": size})
        try:
            handle = saver.save(
                SaveOptions(path, **options), lambda: make(communicator.rank, size), {"framework": "none"}
            )
            handle.wait()
        except Exception as exc:
            return exc
        finally:
            saver.close()
        return None

    with ThreadWorld(size) as world:
        return world.run(main)


def save_whole(path: Path, *, size: int = 1, **options: Any) -> None:
    """Save all tensors from ranks that hold all."""
    raised = save_from(size, path, lambda rank, ranks: {"model": MemoryState(everything(rank, ranks))}, **options)
    assert raised == [None] * size, raised


def load_into(
    size: int,
    path: Path,
    make: Callable[[int, int], Mapping[str, KeepsState]],
    **options: Any,
) -> tuple[list[Mapping[str, KeepsState]], list[BaseException | None], list[list[str]]]:
    """Load on `size` ranks, each a thread; return states, what each one raised, and its warnings."""

    def main(communicator: Communicator) -> tuple[Mapping[str, KeepsState], BaseException | None, list[str]]:
        states = make(communicator.rank, size)
        warnings: list[str] = []
        try:
            load(
                communicator,
                LoadOptions(path, **options),
                lambda checkpoint: states,
                convert=convert,
                report=warnings.append,
            )
        except Exception as exc:
            return states, exc, warnings
        return states, None, warnings

    with ThreadWorld(size) as world:
        outcome = world.run(main)
    return [each[0] for each in outcome], [each[1] for each in outcome], [each[2] for each in outcome]


def convert(source: Buffer, target: Buffer) -> None:
    """Write numbers in another type."""
    array = np.frombuffer(target.bytes(), str(target.dtype))
    array[:] = np.frombuffer(source.bytes(), str(source.dtype))


def read_all(path: Path, section: str = "model") -> dict[str, Array]:
    """Return every tensor of a section, as whole arrays."""
    with Checkpoint(path) as checkpoint:
        found = {}
        for name, tensor in checkpoint.index.sections[section].tensors.items():
            array = np.zeros(tensor.info.shape, str(tensor.info.dtype))
            checkpoint.read(tensor, Part.whole(tensor.info.shape), Buffer.of(array))
            found[name] = array
        return found
