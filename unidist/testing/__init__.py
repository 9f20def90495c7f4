"""The test kit for plugin authors: conformance suites, worlds of threads, pools of ranks.

Nothing here imports a framework. The conformance suites need pytest and numpy (the extra `test`)
and are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist.testing._training import FrameworkTraining, Quadratic, RankOutcome, Training
    from unidist.testing.communicator_conformance import CommunicatorConformance
    from unidist.testing.compressor_conformance import CompressorConformance
    from unidist.testing.framework_conformance import FrameworkConformance, FrameworkSamples
    from unidist.testing.launcher_conformance import LauncherConformance
    from unidist.testing.leaks import Resources, leaked_since
    from unidist.testing.pools import PoolCache
    from unidist.testing.recording import Record, RecordingCommunicator
    from unidist.testing.strategy_conformance import StrategyConformance
    from unidist.testing.threads import ThreadCommunicator, ThreadWorld

__all__ = [
    "CommunicatorConformance", "CompressorConformance", "FrameworkConformance", "FrameworkSamples",
    "FrameworkTraining", "LauncherConformance", "PoolCache", "Quadratic", "RankOutcome", "Record",
    "RecordingCommunicator", "Resources", "StrategyConformance", "ThreadCommunicator", "ThreadWorld", "Training",
    "leaked_since",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "_training": "FrameworkTraining Quadratic RankOutcome Training",
        "communicator_conformance": "CommunicatorConformance",
        "compressor_conformance": "CompressorConformance",
        "framework_conformance": "FrameworkConformance FrameworkSamples",
        "launcher_conformance": "LauncherConformance",
        "leaks": "Resources leaked_since",
        "pools": "PoolCache",
        "recording": "Record RecordingCommunicator",
        "strategy_conformance": "StrategyConformance",
        "threads": "ThreadCommunicator ThreadWorld",
    },
)
