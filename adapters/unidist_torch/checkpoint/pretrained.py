"""Folders of safetensors files, as Hugging Face's libraries write them: `load_pretrained` and `save_pretrained`.

A model may have attributes that those libraries give theirs: `save_pretrained`, `base_model_prefix`, and `config_class`
of its class. None of the libraries is imported.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from unidist.buffer import Buffer, copy
from unidist.checkpoint.agreement import agree
from unidist.checkpoint.format.interface import KeepsState, SavedSection, kept_state
from unidist.checkpoint.format.mapping import MappedSection, NameMapping
from unidist.checkpoint.format.parts import Part, runs
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist.checkpoint.format.reader import match, read_as
from unidist.checkpoint.format.shard import Entry, Shard, write_shard
from unidist.checkpoint.job import make_saver
from unidist.checkpoint.loading import check_parts
from unidist.errors import CheckpointError, UsageError
from unidist.runtime import context
from unidist.waits import calling
from unidist_torch.checkpoint.states import TorchStates
from unidist_torch.file_names import FileNamesSpec
from unidist_torch.framework import TorchFramework
from unidist_torch.memory import buffer_of, tensor_of
from unidist_torch.operations import allgather

_log = logging.getLogger("unidist")

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SECTION = "model"


@calling("ud.load_pretrained()")
def load_pretrained(
    model: torch.nn.Module | type[torch.nn.Module], folder: str | os.PathLike[str], *, strict: bool = True
) -> Any:
    """Load the weights of a safetensors folder, as Hugging Face's `save_pretrained` writes it. Collective.

        model, optimizer = ud.distribute(LlamaForCausalLM(config), optimizer, "zero=3")
        ud.load_pretrained(model, "llama")

    Each rank reads what it holds: with `zero=3` its shards, with `tensor=N` its part of each layer. Nothing is changed
    unless the folder fits on all ranks. Numbers are rounded to the model's types.

    Args:
        model: distributed or not; or a class of the transformers library, which is built by the `config.json` of the
            folder, with all of its weights on each rank.
        folder: with `model.safetensors`, or with several files and `model.safetensors.index.json`. Every rank can read
            it.
        strict: tensors that only one of folder and model has are an error; else what both have is loaded, with a
            warning.

    Returns:
        The model.

    Raises:
        CheckpointError: there is no such folder, it is damaged, or does not fit, on this or another rank.
    """
    runtime = context.current()
    communicator = runtime.owned(make_saver).communicator
    path, what = Path(folder), f"the folder {folder} cannot be loaded"
    report = _log.warning if communicator.rank == 0 else _log.debug
    with ExitStack() as stack:
        parts: dict[str, tuple[KeepsState, SavedSection]] = {}
        names: dict[str, frozenset[str]] = {}
        error: Exception | None = None
        try:
            built = _built(model, path)
            state = _state(built)
            names = {_SECTION: frozenset(state.names())}
            saved = stack.enter_context(SafetensorsFolder(path, report))
            parts = {_SECTION: (state, _named_as(saved, built, names[_SECTION], report))}
        except Exception as exc:  # of whatever kind: the others must hear of it
            error = exc
        check_parts(communicator, parts, names, error, strict=strict, what=what)
        error = None
        try:
            for state, section in parts.values():
                state.load(section, strict=strict)
        except Exception as exc:
            error = exc
        agree(communicator, None, error, what)
    return built


@calling("ud.save_pretrained()")
def save_pretrained(model: torch.nn.Module, folder: str | os.PathLike[str], **options: Any) -> None:
    """Save a model, of any strategy, as a folder that Hugging Face's `from_pretrained` reads. Collective.

    Rank 0 collects the parts of all ranks in its memory, and writes. A model that has a method `save_pretrained` writes
    the files itself, with its configuration; another one becomes one file, `model.safetensors`.

    Args:
        model: distributed or not.
        folder: for rank 0 to write; made if need be.
        options: of the model's own `save_pretrained` (`max_shard_size="5GB"`).

    Raises:
        CheckpointError: rank 0 could not write; raised on every rank.
    """
    whole = whole_state(model)
    error: Exception | None = None
    if whole is not None:
        try:
            _write(model, whole, Path(folder), options)
        except Exception as exc:
            error = exc
    communicator = context.current().owned(make_saver).communicator
    agree(communicator, None, error, f"the folder {folder} cannot be saved")


def whole_state(model: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """Return all tensors of a distributed model on rank 0, in host memory; None on other ranks. Collective.

    Tensors that rank 0 holds whole are the model's own. One that several modules share is there once.
    """
    communicator = context.current().owned(make_saver).communicator
    pieces: list[Piece] = []
    error: Exception | None = None
    try:
        pieces = list(_state(model).pieces())
    except Exception as exc:
        error = exc
    inventory = [(piece.tensor, piece.part) for piece in pieces]
    everyone = agree(communicator, inventory, error, "the model cannot be collected")
    mine = {(piece.tensor.name, piece.part): piece for piece in pieces}
    holders: dict[TensorInfo, dict[Part, int]] = {}
    for rank, listed in enumerate(everyone):
        for info, part in listed:
            holders.setdefault(info, {}).setdefault(part, rank)
    is_writer = communicator.rank == 0
    found: dict[str, torch.Tensor] = {}
    for info, ranks in holders.items():
        if ranks.get(Part.whole(info.shape)) == 0:
            if is_writer:
                found[info.name] = tensor_of(mine[info.name, Part.whole(info.shape)].memory, info.shape)
            continue
        gathered = _gathered(info, ranks, mine, communicator.rank)
        if is_writer:
            found[info.name] = gathered
    return found if is_writer else None


def _gathered(info: TensorInfo, ranks: Mapping[Part, int], mine: Mapping[Any, Piece], rank: int) -> torch.Tensor:
    """Return a whole tensor, of the parts that ranks hold. Collective."""
    ordered = sorted(ranks.items(), key=lambda item: item[1])  # as allgather puts them
    own = [
        tensor_of(mine[info.name, part].memory, (part.count,)).reshape(-1)
        for part, holder in ordered
        if holder == rank and part.count
    ]
    like = torch.empty(0, dtype=tensor_of(Buffer.allocate(0, info.dtype), (0,)).dtype)
    every = buffer_of(allgather(torch.cat(own) if own else like).contiguous())
    whole = Buffer.allocate(info.count, info.dtype)
    start = 0
    for part, _ in ordered:
        for run in runs(Part.whole(info.shape), part):
            copy(every.slice(start + run.source, run.count), whole.slice(run.target, run.count))
        start += part.count
    return tensor_of(whole, info.shape)


class SafetensorsFolder(SavedSection):
    """The tensors of a folder of safetensors files; use it in a `with` statement.

    Args:
        folder: where they are.
        report: warns of what differs where that is allowed.

    Raises:
        CheckpointError: there are none, or one is missing or damaged.
    """

    def __init__(self, folder: Path, report: Any = _log.warning) -> None:
        self.values = {}
        self._folder, self._report = folder, report
        self._shards: list[Shard] = []
        self._entries: dict[str, tuple[Shard, Entry]] = {}
        try:
            for file in _files(folder):
                shard = Shard(folder / file)
                self._shards.append(shard)
                self._entries |= {name: (shard, entry) for name, entry in shard.entries.items()}
        except BaseException:
            self.close()
            raise
        self._tensors = {name: TensorInfo(name, entry.shape, entry.dtype) for name, (_, entry) in self._entries.items()}

    @property
    @override
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @override
    def read(self, name: str, part: Part, target: Buffer) -> None:
        shard, entry = self._entries[name]
        info = self._tensors[name]
        item = info.dtype.itemsize

        def read(raw: Buffer) -> None:
            view = raw.bytes()
            for run in runs(part, Part.whole(info.shape)):
                start, stop = run.target * item, (run.target + run.count) * item
                shard.read(entry.offset + run.source * item, view[start:stop])

        read_as(info, target, read, TorchFramework().convert)

    @override
    def match(self, wanted: Collection[TensorInfo], *, strict: bool = True) -> list[TensorInfo]:
        what = f"the folder {self._folder}"
        return match(what, self._tensors, wanted, strict=strict, report=self._report, elsewhere=self.elsewhere)

    def close(self) -> None:
        """Close all files. Idempotent."""
        while self._shards:
            self._shards.pop().close()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _files(folder: Path) -> Sequence[str]:
    index = folder / INDEX
    if index.exists():
        try:
            return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CheckpointError(f"{index} cannot be read as an index of safetensors files: {exc!r}") from exc
    if (folder / FILE).exists():
        return [FILE]
    there = sorted(path.name for path in folder.iterdir())[:8] if folder.is_dir() else "it is no folder"
    raise CheckpointError(
        f"{folder} has neither {FILE} nor {INDEX} ({there}). Give a folder that save_pretrained has written; files of "
        "pickled tensors (pytorch_model.bin) are not read"
    )


def _built(model: Any, folder: Path) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        return model
    config = getattr(model, "config_class", None)
    if config is None:
        raise UsageError(f"load_pretrained: {model!r} is neither a model nor a class with a config_class")
    built: torch.nn.Module = model(config.from_pretrained(folder))
    return built


def _state(model: torch.nn.Module) -> KeepsState:
    return kept_state(model) or TorchStates().model(model)


def _named_as(saved: SafetensorsFolder, model: torch.nn.Module, wanted: Collection[str], report: Any) -> SavedSection:
    """Return the folder's tensors under the model's names.

    Other names of a tied tensor are left out. A model with a head takes the weights of one without, and back.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    sources: dict[str, str] = {}
    there = saved.tensors
    for name, others in _tied(model):
        for other in others:
            if name in there:
                saved.tensors.pop(other, None)  # type: ignore[attr-defined]  # its own dict
            elif other in there and name in wanted:
                sources[name] = other
    for spec in context.current().plugins.registry(FileNamesSpec):
        for name, other in spec.load()(model, sorted(wanted)).items():
            if name not in there and other in there:
                sources[name] = other
    for name in wanted if len(prefix) > 1 else ():
        if name not in there and name not in sources:
            for other in (name.removeprefix(prefix), prefix + name):
                if other in there and other not in wanted:
                    sources[name] = other
    if not sources:
        return saved
    what = "the folder, by names of the model,"
    return MappedSection(saved, NameMapping(sources), convert=TorchFramework().convert, what=what, report=report)


def _tied(model: torch.nn.Module) -> Iterator[tuple[str, list[str]]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        if others:
            yield first, others


def _write(model: Any, whole: dict[str, torch.Tensor], folder: Path, options: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    own = getattr(model, "save_pretrained", None)
    if own is not None:
        own(folder, state_dict=whole, **options)
        return
    if options:
        raise UsageError(
            f"save_pretrained: {', '.join(options)} would go to the model's own method save_pretrained, and "
            f"{type(model).__name__} has none: leave it out"
        )
    tensors = {name: (tuple(value.shape), buffer_of(value.contiguous())) for name, value in whole.items()}
    write_shard(folder / FILE, tensors, {"format": "pt"})
