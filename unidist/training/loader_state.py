"""The position of a data loader, and the plain data that it is saved as. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unidist.errors import UsageError


@dataclass(frozen=True)
class LoaderPosition:
    """A position of a loader between two batches, the same on every rank.

    Args:
        epoch: the current one.
        processed: items of it that all ranks together have processed. Several numbers: of each worker, for a stream
            of which each worker reads its own part. None: the epoch has not begun.
    """

    epoch: int = 0
    processed: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """The number of processed items of a sequence that is in one part."""
        return self.processed[0] if self.processed else 0


@dataclass(frozen=True)
class LoaderState:
    """All that `state_dict` returns.

    Args:
        position: where to continue.
        data: the data and their order, in words: a loader continues with the same only.
        fingerprint: of the items of the epoch; None: not known.
    """

    position: LoaderPosition
    data: str
    fingerprint: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as numbers, text and lists."""
        return {
            "epoch": self.position.epoch,
            "processed": list(self.position.processed),
            "data": self.data,
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def of_dict(cls, state: Any, *, data: str, most_parts: int, rank: int) -> LoaderState:
        """Return the state that `as_dict` made a dict of.

        Args:
            state: the dict.
            data: of the loader that is to continue, in words.
            most_parts: largest number of parts in which that loader reads its data, which is its number of workers.
            rank: of this process, for errors.

        Raises:
            UsageError: it is another loader's, or of other data.
        """
        if not _is_state(state):
            found = f"the keys {sorted(map(str, state))}" if isinstance(state, Mapping) else f"a {type(state).__name__}"
            raise UsageError(
                f"load_state_dict() on rank {rank} was given {found}; give it what state_dict() of a loader of "
                "ud.shard() returned, unchanged"
            )
        if state["data"] != data:
            raise UsageError(
                f"load_state_dict() on rank {rank}: the state is of {state['data']}, and this loader has {data}. "
                "Make the loader as it was when the state was saved; the number of ranks may differ"
            )
        processed = tuple(state["processed"])
        if len(processed) > 1 and len(processed) != most_parts:
            raise UsageError(
                f"load_state_dict() on rank {rank}: the state is of {len(processed)} workers that each read their own "
                f"part of a stream, and this loader has num_workers={most_parts}. Give it num_workers={len(processed)}"
            )
        return cls(LoaderPosition(state["epoch"], processed), data, state["fingerprint"])


def _is_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or not {"epoch", "processed", "data", "fingerprint"} <= state.keys():
        return False
    processed = state["processed"]
    return isinstance(processed, list | tuple) and all(
        isinstance(each, int) and each >= 0 for each in (state["epoch"], *processed)
    )
