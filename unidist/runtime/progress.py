"""The progress of this rank, which it tells its launcher: steps, samples, waiting, memory, and values of the script."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unidist.errors import UsageError
from unidist.settings.rank_process import ReportMemory
from unidist.timeline import Recorder

_PAUSE_SEC = 0.25
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_VALUES = 16


class ProgressReporter:
    """Counts steps and samples, and tells the launcher a few times a second. Costs nothing without a launcher.

    The script's thread calls it.

    Args:
        rank: of this process.
        memory: where the launcher reads it; None: there is no launcher of ours.
        recorder: knows how long this rank has waited for others.
        counts_samples: asked when samples are reported: whether this rank counts for the ranks that hold parts of the
            same model, and so train on the same samples.
    """

    def __init__(
        self, rank: int, memory: ReportMemory | None, recorder: Recorder, counts_samples: Callable[[], bool]
    ) -> None:
        self._rank = rank
        self._memory = memory
        self._recorder = recorder
        self._counts_samples = counts_samples
        self._num_steps = self._num_samples = self._num_in_steps = 0
        self._values: dict[str, Any] = {}
        self._written = -math.inf

    @property
    def samples(self) -> int:
        """The number that this rank has trained on, where it counts for the ranks of its model."""
        return max(self._num_samples, self._num_in_steps)

    def step(self) -> None:
        """Count an update of an optimizer."""
        self._num_steps += 1
        self._write_now_and_then()

    def report(self, values: Mapping[str, Any], samples: int, *, of_step: bool = False) -> None:
        """Take values of this rank, and samples that it has trained on since the last call; see `unidist.torch.report`.

        Those that a script reports beside a `TrainStep`, which does so itself, are the same samples, and count once.

        Args:
            values: by name.
            samples: that were trained on.
            of_step: a `TrainStep` reports, and not the script.

        Raises:
            UsageError: a value is no number, or there are too many.
        """
        if samples < 0:
            raise UsageError(f"report(samples={samples}) on rank {self._rank}: give the number of samples, from 0")
        checked = {name: self._checked(name, value) for name, value in values.items()}
        if len(self._values.keys() | checked.keys()) > _MAX_VALUES:
            raise UsageError(
                f"report({', '.join(values)}) on rank {self._rank}: more than {_MAX_VALUES} names of values by now"
            )
        self._values.update(checked)
        if samples and self._counts_samples():
            if of_step:
                self._num_in_steps += samples
            else:
                self._num_samples += samples
        self._write_now_and_then()

    def close(self) -> None:
        """Tell the last values."""
        if self._memory is not None:
            self._write()
            self._memory.close()
            self._memory = None

    def _checked(self, name: str, value: Any) -> Any:
        """Return a number, or a tensor of one that is read later: reading it may wait for a GPU."""
        detach = getattr(value, "detach", None)
        try:
            if detach is None:
                return float(value)
            if value.numel() == 1:
                return detach()
        except (TypeError, ValueError):
            pass
        raise UsageError(
            f"report({name}=...) on rank {self._rank}: {type(value).__name__} is not one number; give a number, or a "
            "tensor of one element, outside of compiled functions"
        )

    def _write_now_and_then(self) -> None:
        if self._memory is not None and time.monotonic() - self._written >= _PAUSE_SEC:
            self._write()

    def _write(self) -> None:
        assert self._memory is not None
        self._written = now = time.monotonic()
        self._memory.write(
            {
                "time": round(now, 4),
                "steps": self._num_steps,
                "samples": self.samples,
                "waited_sec": round(self._recorder.waited_sec, 4),
                "data_sec": round(self._recorder.all_data_sec, 4),
                "memory_bytes": _resident_bytes(),
                "values": {name: _plain(float(value)) for name, value in self._values.items()},
            }
        )


def _plain(value: float) -> float | str:
    """Return a number as JSON has it: others than finite ones as text."""
    return value if math.isfinite(value) else str(value)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


__all__ = ["ProgressReporter"]
