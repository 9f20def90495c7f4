"""Advice for scripts that differentiate Horovod's all-gather in a training of `distribute`."""

from __future__ import annotations

import warnings

from unidist.runtime.context import Context


class GatherAdvice:
    """The advice of one runtime, which rank 0 gives once, to scripts that train by `distribute` or `TrainStep`.

    Args:
        runtime: of this process.
    """

    def __init__(self, runtime: Context) -> None:
        self._runtime = runtime
        self._is_due = runtime.topology.rank == 0

    def give(self) -> None:
        """Warn that the gradient of `allgather` is Horovod's, if that is news."""
        if self._is_due and self._runtime.has_strategies:
            self._is_due = False
            warnings.warn(
                "the gradient of allgather is averaged over the ranks, as Horovod's is, and those of parameters are "
                "averaged again: a loss over gathered samples trains with 1/N of its gradient. Use "
                "ud.gather_samples(tensor), whose gradient is that of one process",
                UserWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Nothing to give back."""
