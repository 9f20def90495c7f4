"""The engines of the core, and the choice among all: `single` for one process, `shm` for the processes of one host.

The data path of `shm` is C (`shm_native/`). Imports the root, `settings` and `algorithms`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.engines.choice import AUTO, EngineChoice, check_engine, check_same, choose, meeting_place
    from unidist.engines.shm import ShmEngine
    from unidist.engines.single import SingleCommunicator, SingleEngine

__all__ = [
    "AUTO", "EngineChoice", "ShmEngine", "SingleCommunicator", "SingleEngine", "check_engine", "check_same", "choose",
    "meeting_place",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "choice": "AUTO EngineChoice check_engine check_same choose meeting_place",
        "shm": "ShmEngine",
        "single": "SingleCommunicator SingleEngine",
    },
)
