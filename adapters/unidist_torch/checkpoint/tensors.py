"""Tensors of this rank as pieces of a checkpoint, and filled from one."""

from __future__ import annotations

import torch

from unidist.buffer import HOST, Buffer
from unidist.checkpoint.format.interface import SavedSection
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import Piece, TensorInfo
from unidist_torch.memory import buffer_of, memory_kind


def piece_of(info: TensorInfo, part: Part, tensor: torch.Tensor) -> Piece:
    """Return a tensor of this rank as a piece; it is copied when it is written, unless it is contiguous host memory."""
    tensor = tensor.detach()
    if memory_kind(tensor) == HOST and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return Piece(info, part, buffer_of(tensor))

    def copied() -> Buffer:
        return buffer_of(tensor.to("cpu").resolve_conj().resolve_neg().contiguous())

    return Piece(info, part, copied)


def read_into(section: SavedSection, name: str, part: Part, tensor: torch.Tensor) -> None:
    """Read part of a saved tensor into one of this rank, on any device and in any memory order."""
    tensor = tensor.detach()
    if memory_kind(tensor) == HOST and tensor.is_contiguous():
        section.read(name, part, buffer_of(tensor))
        return
    staged = torch.empty(tensor.shape, dtype=tensor.dtype)
    section.read(name, part, buffer_of(staged))
    tensor.copy_(staged)
