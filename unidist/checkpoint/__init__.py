"""Saving and loading by all ranks; checkpoints load at any world size, under any strategy, in any framework.

`docs/checkpoints.md` has the format, `format/` reads and writes it. A sharded optimizer or model takes part through
`KeepsState` and `PlacesParameters`. The facades have `save` and `load`. Imports `runtime`,
`checkpoint.format` and the folders below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.checkpoint import format
    from unidist.checkpoint.agreement import agree
    from unidist.checkpoint.convert import Export, Import, read_whole, state_of_tensors, to_checkpoint
    from unidist.checkpoint.framework_states import FrameworkStates
    from unidist.checkpoint.job import CheckpointObjects, MappingLike, load_job, make_saver, save_job
    from unidist.checkpoint.loading import Loaded, LoadOptions, check_parts, load
    from unidist.checkpoint.plain_state import PlainState
    from unidist.checkpoint.redistribution import ranks_of, redistribute_job
    from unidist.checkpoint.rng import SECTION, RandomState
    from unidist.checkpoint.save_request import OnError, SaveHandle, SaveOptions
    from unidist.checkpoint.saving import Saver, plain
    from unidist.checkpoint.update_state import UpdateState

__all__ = [
    "CheckpointObjects", "Export", "FrameworkStates", "Import", "LoadOptions", "Loaded", "MappingLike", "OnError",
    "PlainState", "RandomState", "SECTION", "SaveHandle", "SaveOptions", "Saver", "UpdateState", "agree",
    "check_parts", "format", "load", "load_job", "make_saver", "plain", "ranks_of", "read_whole", "redistribute_job",
    "save_job", "state_of_tensors", "to_checkpoint",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "": "format",
        "agreement": "agree",
        "convert": "Export Import read_whole state_of_tensors to_checkpoint",
        "framework_states": "FrameworkStates",
        "job": "CheckpointObjects MappingLike load_job make_saver save_job",
        "loading": "LoadOptions Loaded check_parts load",
        "plain_state": "PlainState",
        "redistribution": "ranks_of redistribute_job",
        "rng": "RandomState SECTION",
        "save_request": "OnError SaveHandle SaveOptions",
        "saving": "Saver plain",
        "update_state": "UpdateState",
    },
)
