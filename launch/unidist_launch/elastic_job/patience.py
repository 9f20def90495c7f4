"""When an elastic job is given up: nothing gets on, or it has changed too often. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from unidist_launch.remote.failure import RankExit


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

    def snapshot(self) -> dict[str, Any]:
        """Return what another launcher needs to go on counting; plain data."""
        failures = [asdict(end) for end in self.failures]
        return {"num_worlds": self._num_worlds, "progress": self._progress, "failures": failures}

    def restore(self, kept: dict[str, Any]) -> None:
        """Take over what `snapshot` returned."""
        self._num_worlds, self._progress = int(kept["num_worlds"]), int(kept["progress"])
        self.failures = [RankExit(**{**end, "stderr_tail": tuple(end["stderr_tail"])}) for end in kept["failures"]]

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
