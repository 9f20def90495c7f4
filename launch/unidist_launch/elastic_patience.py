"""When an elastic job is given up: nothing gets on, or it has changed too often. Pure."""

from __future__ import annotations

from unidist_launch.failure import RankExit


class Patience:
    """Counts what goes wrong between two commits.

    Args:
        num_proc: ranks at the beginning; twice as many may fail without a commit in between.
        reset_limit: so many times may the world change; None: as often as it has to.
    """

    def __init__(self, num_proc: int, reset_limit: int | None) -> None:
        self._max_failures = 2 * num_proc
        self._reset_limit = reset_limit
        self._num_worlds = 0
        self._progress = 0
        self.failures: list[RankExit] = []
        """How processes failed since the last commit, in order."""

    def world_began(self, progress: int) -> str:
        """A generation has begun, from this commit; returns why the job is to end, or ""."""
        self._num_worlds += 1
        if progress > self._progress:
            self._progress = progress
            self.failures.clear()
        num_resets = self._num_worlds - 1
        if self._reset_limit is not None and num_resets > self._reset_limit:
            return f"the world has changed {num_resets} times, and --reset-limit is {self._reset_limit}"
        return ""

    def failed(self, end: RankExit) -> str:
        """A process has failed; returns why the job is to end, or ""."""
        self.failures.append(end)
        if len(self.failures) > self._max_failures:
            return f"{len(self.failures)} processes failed, and no commit was made in between"
        return ""
