"""The format of checkpoints on disk: an index and shards, and the mapping of saved tensors to those of a rank.

`interface` is what states and models implement. Imports the root only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.checkpoint.format import directory, index, readers
    from unidist.checkpoint.format.index import Index
    from unidist.checkpoint.format.interface import (
        STATE_ATTRIBUTE,
        HasKeptState,
        KeepsState,
        MemoryState,
        PlacesParameters,
        Plain,
        SavedSection,
        WholeInPlace,
        WholeParameters,
        kept_state,
        placements_of,
    )
    from unidist.checkpoint.format.mapping import MappedSection, NameMapping, mapped_section
    from unidist.checkpoint.format.optimizer_record import STEP, OptimizerRecord
    from unidist.checkpoint.format.parts import Box, Part, Run, runs
    from unidist.checkpoint.format.pieces import Piece, Placement, TensorInfo, slot_name, split_slot
    from unidist.checkpoint.format.reader import Checkpoint, Convert, match, read_as
    from unidist.checkpoint.format.shard import Entry, Shard, sync, write_shard
    from unidist.checkpoint.format.slots import KERAS, OPTAX, TORCH, OptimizerNaming
    from unidist.checkpoint.format.writing import (
        Identity,
        RankInventory,
        WrittenShard,
        assign,
        check_inventories,
        make_index,
        merge_values,
        write,
    )

__all__ = [
    "Box", "Checkpoint", "Convert", "Entry", "HasKeptState", "Identity", "Index", "KERAS", "KeepsState",
    "MappedSection", "MemoryState", "NameMapping", "OPTAX", "OptimizerNaming", "OptimizerRecord", "Part", "Piece",
    "Placement", "PlacesParameters", "Plain", "RankInventory", "Run", "STATE_ATTRIBUTE", "STEP", "SavedSection",
    "Shard", "TORCH", "TensorInfo", "WholeInPlace", "WholeParameters", "WrittenShard", "assign", "check_inventories",
    "directory", "index", "kept_state", "make_index", "mapped_section", "match", "merge_values", "placements_of",
    "read_as", "readers", "runs", "slot_name", "split_slot", "sync", "write", "write_shard",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "directory index readers",
        "index": "Index",
        "interface": (
            "HasKeptState KeepsState MemoryState PlacesParameters Plain STATE_ATTRIBUTE SavedSection WholeInPlace "
            "WholeParameters kept_state placements_of"
        ),
        "mapping": "MappedSection NameMapping mapped_section",
        "optimizer_record": "OptimizerRecord STEP",
        "parts": "Box Part Run runs",
        "pieces": "Piece Placement TensorInfo slot_name split_slot",
        "reader": "Checkpoint Convert match read_as",
        "shard": "Entry Shard sync write_shard",
        "slots": "KERAS OPTAX OptimizerNaming TORCH",
        "writing": "Identity RankInventory WrittenShard assign check_inventories make_index merge_values write",
    },
)
