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
        self._has_committed = False
        self.failures: list[RankExit] = []
        """How processes failed, in order, without a commit in between."""

    def snapshot(self) -> dict[str, Any]:
        """Return what another launcher needs to go on counting; plain data."""
        failures = [asdict(end) for end in self.failures]
        return {"num_worlds": self._num_worlds, "has_committed": self._has_committed, "failures": failures}

    def restore(self, kept: dict[str, Any]) -> None:
        """Take over what `snapshot` returned."""
        self._num_worlds, self._has_committed = int(kept["num_worlds"]), bool(kept["has_committed"])
        self.failures = [RankExit(**{**end, "stderr_tail": tuple(end["stderr_tail"])}) for end in kept["failures"]]

    def committed(self) -> None:
        """A rank has made a commit, of whatever number: where all ranks are lost they begin to count again."""
        self._has_committed = True

    def world_began(self) -> str:
        """A generation has begun; returns why the job is to end, or ""."""
        self._num_worlds += 1
        num_resets = self._num_worlds - 1
        if self._reset_limit is not None and num_resets > self._reset_limit:
            return f"the world has changed {num_resets} times, and --reset-limit is {self._reset_limit}"
        return ""

    def failed(self, end: RankExit) -> str:
        """A process has failed; returns why the job is to end, or ""."""
        if self._has_committed:
            self._has_committed = False
            self.failures.clear()
        self.failures.append(end)
        if len(self.failures) > self._max_failures:
            return f"{len(self.failures)} processes failed, and no commit was made in between"
        return ""
