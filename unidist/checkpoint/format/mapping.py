"""Maps the tensor names of one model to those of another: loads a PyTorch checkpoint into a Keras model, and back.

A mapping says for each path of the model that is loaded where in the checkpoint it is:

    dense/kernel: {from: fc.weight, permute: [1, 0]}
    dense/bias: fc.bias
    query/kernel: {from: in_proj_weight, box: [[0, 64], [0, 64]], permute: [1, 0], shape: [64, 4, 16]}

`box` cuts a part out, then `permute` reorders its dims, then `shape` reshapes it. Optimizer state follows its
parameter. Paths that are the same on both sides need no entry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from typing_extensions import override

from unidist.buffer import Buffer, copy
from unidist.checkpoint.format.interface import SavedSection
from unidist.checkpoint.format.parts import Box, Part, runs
from unidist.checkpoint.format.pieces import SLOT, TensorInfo, slot_name, split_slot
from unidist.checkpoint.format.reader import Checkpoint, Convert, match, read_as
from unidist.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True)
class Source:
    """The source of a tensor in a checkpoint.

    Args:
        path: of the tensor in the checkpoint.
        box: the part to use; None: all of it.
        permute: the dims of the box in their new order; None: unchanged.
        shape: final shape; None: unchanged.
    """

    path: str
    box: Box | None = None
    permute: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, target: str, value: object) -> Source:
        """Return what a mapping says for `target`: a path, or a dict with `from`, `box`, `permute` and `shape`.

        Raises:
            ConfigurationError: it is neither.
        """
        if isinstance(value, Source):
            return value
        if isinstance(value, str):
            return cls(value)
        try:
            assert isinstance(value, Mapping)
            unknown = value.keys() - {"from", "box", "permute", "shape"}
            assert not unknown
            box, permute, shape = value.get("box"), value.get("permute"), value.get("shape")
            return cls(
                str(value["from"]),
                None if box is None else tuple((int(low), int(high)) for low, high in box),
                None if permute is None else tuple(map(int, permute)),
                None if shape is None else tuple(map(int, shape)),
            )
        except (AssertionError, KeyError, TypeError, ValueError) as exc:
            raise ConfigurationError(
                f"the mapping says for {target!r}: {value!r}. Give the path in the checkpoint, or "
                "{from: PATH, box: [[start, stop], ...], permute: [dim, ...], shape: [size, ...]}"
            ) from exc

    @property
    def is_plain(self) -> bool:
        """Return whether it changes the name alone."""
        return self.box is None and self.permute is None and self.shape is None

    def shape_of(self, info: TensorInfo) -> tuple[int, ...]:
        """Return the shape that comes out of a tensor of the checkpoint.

        Raises:
            CheckpointError: box, permutation or shape do not fit the tensor.
        """
        box = self._box(info)
        sizes = tuple(stop - start for start, stop in box)
        if self.permute is not None:
            if sorted(self.permute) != list(range(len(sizes))):
                raise CheckpointError(f"the mapping's permute {list(self.permute)} does not order the dims of {info}")
            sizes = tuple(sizes[dim] for dim in self.permute)
        if self.shape is not None:
            if prod(self.shape) != prod(sizes):
                raise CheckpointError(f"the mapping's shape {list(self.shape)} does not fit {list(sizes)}, of {info}")
            sizes = self.shape
        return sizes

    def take(self, section: SavedSection, info: TensorInfo, target: Buffer) -> None:
        """Fill `target`, of the checkpoint's type, with the whole tensor that comes out."""
        import numpy as np  # every framework that loads tensors brings it

        box = self._box(info)
        raw = Buffer.allocate(target.count, info.dtype)
        section.read(info.name, Part.of_box(box), raw)
        # Elements are moved and not looked at, so that any type of their size will do.
        items = np.frombuffer(raw.bytes(), np.dtype((np.void, info.dtype.itemsize)))
        array = items.reshape([stop - start for start, stop in box])
        moved = np.ascontiguousarray(array if self.permute is None else array.transpose(self.permute))
        np.frombuffer(target.bytes(), items.dtype)[:] = moved.reshape(-1)

    def _box(self, info: TensorInfo) -> Box:
        box = tuple((0, size) for size in info.shape) if self.box is None else self.box
        if any(low > high or low < 0 for low, high in box) or not Part.of_box(box).fits(info.shape):
            raise CheckpointError(f"the mapping's box {[list(dim) for dim in box]} does not lie within {info}")
        return box


class NameMapping:
    """A mapping of paths; `mapping=` of `load`.

    Args:
        sources: by path of the model that is loaded; see the text of the module.

    Raises:
        ConfigurationError: an entry cannot be understood.
    """

    def __init__(self, sources: Mapping[str, Any]) -> None:
        self.sources = {target: Source.of(target, value) for target, value in sources.items()}

    @classmethod
    def of(cls, value: NameMapping | Mapping[str, Any] | str | Path) -> NameMapping:
        """Return a mapping, from a dict, or from a file of YAML or JSON."""
        if isinstance(value, NameMapping):
            return value
        if isinstance(value, Mapping):
            return cls(value)
        path = Path(value)
        try:
            text = path.read_text(encoding="utf-8")
            content = json.loads(text) if path.suffix == ".json" else _yaml(text)
        except (OSError, ValueError) as exc:
            raise ConfigurationError(f"the mapping {path} cannot be read: {exc}") from exc
        if not isinstance(content, dict):
            raise ConfigurationError(
                f"the mapping {path} has no names: it gives paths of the checkpoint for the model's"
            )
        return cls(content)

    def source(self, name: str) -> Source | None:
        """Return where a tensor is taken from; slots of optimizer state follow their parameter."""
        if SLOT not in name:
            return self.sources.get(name)
        path, slot = split_slot(name)
        found = self.sources.get(path)
        return None if found is None else Source(slot_name(found.path, slot), found.box, found.permute, found.shape)


class MappedSection(SavedSection):
    """A section under the names of the model that is loaded.

    Args:
        section: as it was saved.
        mapping: of names. Paths of the checkpoint that it does not take keep their names.
        convert: see `Checkpoint`.
        what: the section, for messages.
        report: see `Checkpoint`.
    """

    def __init__(
        self,
        section: SavedSection,
        mapping: NameMapping,
        *,
        convert: Convert | None,
        what: str,
        report: Callable[[str], None],
    ) -> None:
        self._section = section
        self._convert = convert
        self._what = what
        self._report = report
        self._sources: dict[str, tuple[Source, TensorInfo]] = {}
        taken = {source.path for source in mapping.sources.values()}
        slots = {split_slot(name)[1] for name in section.tensors if SLOT in name}
        for name, info in section.tensors.items():
            path = split_slot(name)[0] if SLOT in name else name
            if path not in taken and path not in mapping.sources:
                self._sources[name] = (Source(name), info)
        for target in mapping.sources:
            for name in (target, *(slot_name(target, slot) for slot in slots)):
                source = mapping.source(name)
                found = section.tensors.get(source.path) if source is not None else None
                if source is not None and found is not None:
                    self._sources[name] = (source, found)
        self._tensors = {
            name: TensorInfo(name, source.shape_of(info), info.dtype) for name, (source, info) in self._sources.items()
        }
        self.values = _renamed(section.values, {target: source.path for target, source in mapping.sources.items()})

    @property
    @override
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @override
    def read(self, name: str, part: Part, target: Buffer) -> None:
        """Read part of a tensor. One that is more than renamed is read whole and cut here."""
        if name not in self._sources:
            raise CheckpointError(f"the mapping has no tensor {name!r} for {self._what}")
        source, saved = self._sources[name]
        if source.is_plain:
            self._section.read(saved.name, part, target)
            return
        info = self._tensors[name]
        whole = Buffer.allocate(info.count, info.dtype)
        source.take(self._section, saved, whole)

        def read(raw: Buffer) -> None:
            for run in runs(part, Part.whole(info.shape)):
                copy(whole.slice(run.source, run.count), raw.slice(run.target, run.count))

        read_as(info, target, read, self._convert)

    @override
    def match(self, wanted: Collection[TensorInfo], *, strict: bool = True) -> list[TensorInfo]:
        return match(self._what, self._tensors, wanted, strict=strict, report=self._report, elsewhere=self.elsewhere)


def mapped_section(
    checkpoint: Checkpoint, section: str, mapping: NameMapping, convert: Convert | None = None
) -> SavedSection:
    """Return a section under the names that a mapping gives it."""
    found = checkpoint.section(section)
    if not mapping.sources:
        return found
    what = f"section {section!r} of {checkpoint.folder}, mapped,"
    return MappedSection(found, mapping, convert=convert, what=what, report=checkpoint.report)


def _renamed(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Return an optimizer's values with the new paths for keys; `sources` says for each where it comes from."""
    found = dict(values)
    taken = set(sources.values())
    for key in ("group_of", "scalars", "families"):
        old = found.get(key)
        if isinstance(old, dict):
            kept = {path: value for path, value in old.items() if path not in taken and path not in sources}
            found[key] = kept | {target: old[path] for target, path in sources.items() if path in old}
    return found


def _yaml(text: str) -> object:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc
