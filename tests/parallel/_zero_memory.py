"""How much memory of the machine the ranks of a training take, beside what they took before."""

from __future__ import annotations

import ctypes
import gc
import importlib
import re
from pathlib import Path
from typing import Any, Protocol, cast

from unidist.settings.environment import set_variables

WIDTH, LAYERS = 2048, 24
NUM_PARAMETERS = LAYERS * WIDTH * WIDTH


class Backend(Protocol):
    """What each framework brings: the modules `_torch_zero_memory` and `_keras_zero_memory`.

    Attributes:
        ud: the facade.
    """

    ud: Any

    def warm_up(self) -> None:
        """Train something small: frameworks load much of themselves when first used."""

    def train(self, within: list[int]) -> object:
        """Train a network of `LAYERS` square matrices with AdamW; return what is kept between two updates.

        Args:
            within: gets `resident_bytes` within the last forward.
        """


def resident_bytes(ud: Any) -> int:
    """Return this process's part of the machine's memory; memory that several processes map counts in equal parts.

    What was freed and kept by the C library for the next step goes back to the system before. Collective.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    ud.barrier()
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    ud.barrier()
    return int(found.group(1)) * 1024


def bytes_per_parameter(framework: str, strategy: str) -> tuple[float, float]:
    """Train with a strategy; returns what a rank holds between two updates, and within a forward.

    In bytes per parameter, the mean over the ranks.
    """
    half = cast(Backend, importlib.import_module(f"_{framework}_zero_memory"))
    with set_variables({"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": "shm"}):
        half.ud.init()
        try:
            half.warm_up()
            before = resident_bytes(half.ud)
            within: list[int] = []
            kept = half.train(within)
            found = [resident_bytes(half.ud) - before, within[0] - before]
            del kept
            everyone = half.ud.allgather_object(found)
            between, forward = (sum(each) / NUM_PARAMETERS / len(everyone) for each in zip(*everyone, strict=True))
            return between, forward
        finally:
            half.ud.shutdown()
