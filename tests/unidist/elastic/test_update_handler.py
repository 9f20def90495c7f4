"""The framework-free part of an optimizer in an elastic state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from unidist.elastic.handlers import UpdateHandler, update_handlers


class Scaler:
    scale = 8.0

    def state(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]


class Counts:
    name = "counts"

    def __init__(self) -> None:
        self.seen = [1]

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def update() -> Any:
    return SimpleNamespace(step=4, scaler=Scaler(), strategies=[Counts()])


def test_what_was_kept_at_a_commit_comes_back() -> None:
    bound = update()
    handler = UpdateHandler(bound)
    for _ in range(2):  # a second time, too: what is kept does not change with what was restored
        bound.step, bound.scaler.scale = 6, 2.0
        bound.strategies[0].seen.append(2)
        handler.restore()
        assert (bound.step, bound.scaler.scale, bound.strategies[0].seen) == (4, 8.0, [1])


def test_a_rank_that_joins_takes_what_another_has() -> None:
    here, there = update(), update()
    here.step, here.scaler.scale = 9, 0.5
    here.strategies[0].seen = [1, 2, 3]
    UpdateHandler(there).take(UpdateHandler(here).given())
    assert (there.step, there.scaler.scale, there.strategies[0].seen) == (9, 0.5, [1, 2, 3])


def test_only_bound_optimizers_have_one() -> None:
    found = update_handlers({"optimizer": update(), "other": None})
    assert list(found) == ["updates of optimizer"]
    assert not found["updates of optimizer"].differs
