"""The test kit for plugin authors: conformance suites, worlds of threads, pools of ranks.

Nothing here imports a framework. The conformance suites need pytest and numpy (`pip install unidist-train[test]`)
and are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unidist.testing.communicator_conformance import CommunicatorConformance
    from unidist.testing.leaks import Resources, leaked_since
    from unidist.testing.pools import PoolCache
    from unidist.testing.recording import Record, RecordingCommunicator
    from unidist.testing.strategy_conformance import StrategyConformance
    from unidist.testing.threads import ThreadCommunicator, ThreadWorld

__all__ = [
    "CommunicatorConformance",
    "PoolCache",
    "Record",
    "RecordingCommunicator",
    "Resources",
    "StrategyConformance",
    "ThreadCommunicator",
    "ThreadWorld",
    "leaked_since",
]

_MODULES = {
    "CommunicatorConformance": "communicator_conformance",
    "PoolCache": "pools",
    "Record": "recording",
    "RecordingCommunicator": "recording",
    "Resources": "leaks",
    "StrategyConformance": "strategy_conformance",
    "ThreadCommunicator": "threads",
    "ThreadWorld": "threads",
    "leaked_since": "leaks",
}


def __getattr__(name: str) -> object:
    """Import a name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'unidist.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"unidist.testing.{_MODULES[name]}"), name)
