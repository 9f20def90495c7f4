"""Checkpoints as torch files and as PyTorch's distributed checkpoints (DCP), and DCP folders as checkpoints."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from unidist.checkpoint.convert import read_whole, state_of_tensors
from unidist.checkpoint.format.interface import MemoryState
from unidist.checkpoint.format.mapping import NameMapping, mapped_section
from unidist.checkpoint.format.reader import Checkpoint
from unidist.errors import CheckpointError
from unidist_torch.framework import TorchFramework
from unidist_torch.memory import buffer_of, tensor_of

_ALONE: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}
"""Arguments of what saves and loads in this process alone; PyTorch 2.6 has none, and finds out by itself."""


def to_torch_file(checkpoint: Path, output: Path, *, section: str, mapping: NameMapping, model: str) -> None:
    """Write a section as a state_dict, for `torch.load` and `model.load_state_dict`; see `Export`."""
    torch.save(_state_dict(checkpoint, section, mapping), output)


def to_distributed_checkpoint(
    checkpoint: Path, output: Path, *, section: str, mapping: NameMapping, model: str
) -> None:
    """Write a section as a folder of `torch.distributed.checkpoint`, under the key "model"; see `Export`."""
    state: dict[str, Any] = {"model": _state_dict(checkpoint, section, mapping)}
    with _in_one_process():
        save(state, checkpoint_id=output, **_ALONE)


def from_distributed_checkpoint(folder: Path) -> dict[str, MemoryState]:
    """Read the tensors of a DCP folder; see `Import`. Torch's own planner puts the pieces of all ranks together.

    Tensors under "model." become the section "model"; if there are none, all of them do. What is no tensor, and the
    optimizer's state, is left out: DCP leaves its form to the script that saves.
    """
    try:
        metadata = FileSystemReader(folder).read_metadata()
        state = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        prefix = "model." if any(name.startswith("model.") for name in state) else ""
        state = {name: tensor for name, tensor in state.items() if name.startswith(prefix)}
        with _in_one_process():
            load(state, checkpoint_id=folder, **_ALONE)
    except Exception as exc:  # whatever torch raises for what it cannot read
        raise CheckpointError(f"{folder} cannot be read as a distributed checkpoint of PyTorch: {exc}") from exc
    tensors = {name.removeprefix(prefix): (tuple(each.shape), buffer_of(each)) for name, each in state.items()}
    return {"model": state_of_tensors(tensors)}


@contextmanager
def _in_one_process() -> Iterator[None]:
    """Silence torch's warning that it is not distributed, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is ", category=UserWarning)
        yield


def _state_dict(checkpoint: Path, section: str, mapping: NameMapping) -> dict[str, torch.Tensor]:
    with Checkpoint(checkpoint, convert=TorchFramework().convert) as opened:
        found = mapped_section(opened, section, mapping)
        return {name: tensor_of(read_whole(found, info), info.shape) for name, info in found.tensors.items()}
