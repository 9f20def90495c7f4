"""The format of checkpoints on disk: an index and shards, and the mapping of saved tensors to those of a rank.

`interface` is what states and models implement. Imports the root and `optim`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist._lazy import lazy_names

if TYPE_CHECKING:
    from unidist.checkpoint.format import directory, index
    from unidist.checkpoint.format.index import Index
    from unidist.checkpoint.format.interface import (
        STATE_ATTRIBUTE,
        HasKeptState,
        KeepsState,
        MemoryState,
        PlacesParameters,
        Plain,
        SavedSection,
        WholeParameters,
        kept_state,
        placements_of,
    )
    from unidist.checkpoint.format.mapping import NameMapping, mapped_section
    from unidist.checkpoint.format.optimizer_record import STEP, OptimizerRecord
    from unidist.checkpoint.format.parts import Box, Part, Run, runs
    from unidist.checkpoint.format.pieces import Piece, Placement, TensorInfo, slot_name, split_slot
    from unidist.checkpoint.format.reader import Checkpoint, Convert, match, read_as
    from unidist.checkpoint.format.shard import sync, write_shard
    from unidist.checkpoint.format.slots import KERAS, TORCH, Speech
    from unidist.checkpoint.format.writing import (
        Identity,
        Offer,
        Written,
        assign,
        check_offers,
        make_index,
        merge_values,
        write,
    )

__all__ = [
    "Box",
    "STATE_ATTRIBUTE",
    "Checkpoint",
    "Convert",
    "HasKeptState",
    "Identity",
    "Index",
    "KERAS",
    "KeepsState",
    "MemoryState",
    "NameMapping",
    "Offer",
    "OptimizerRecord",
    "Part",
    "Piece",
    "Placement",
    "PlacesParameters",
    "Plain",
    "Run",
    "STEP",
    "SavedSection",
    "Speech",
    "TORCH",
    "TensorInfo",
    "WholeParameters",
    "Written",
    "assign",
    "check_offers",
    "directory",
    "index",
    "kept_state",
    "make_index",
    "mapped_section",
    "match",
    "merge_values",
    "placements_of",
    "read_as",
    "runs",
    "slot_name",
    "split_slot",
    "sync",
    "write",
    "write_shard",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Box": "parts",
        "STATE_ATTRIBUTE": "interface",
        "Checkpoint": "reader",
        "Convert": "reader",
        "HasKeptState": "interface",
        "Identity": "writing",
        "Index": "index",
        "KERAS": "slots",
        "KeepsState": "interface",
        "MemoryState": "interface",
        "NameMapping": "mapping",
        "Offer": "writing",
        "OptimizerRecord": "optimizer_record",
        "Part": "parts",
        "Piece": "pieces",
        "Placement": "pieces",
        "PlacesParameters": "interface",
        "Plain": "interface",
        "Run": "parts",
        "STEP": "optimizer_record",
        "SavedSection": "interface",
        "Speech": "slots",
        "TORCH": "slots",
        "TensorInfo": "pieces",
        "WholeParameters": "interface",
        "Written": "writing",
        "assign": "writing",
        "check_offers": "writing",
        "directory": "",
        "index": "",
        "kept_state": "interface",
        "make_index": "writing",
        "mapped_section": "mapping",
        "match": "reader",
        "merge_values": "writing",
        "placements_of": "interface",
        "read_as": "reader",
        "runs": "parts",
        "slot_name": "pieces",
        "split_slot": "pieces",
        "sync": "shard",
        "write": "writing",
        "write_shard": "shard",
    },
)
