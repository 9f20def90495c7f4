"""The trainings of the strategy conformance suite: which samples, which mode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unidist.testing import _training
from unidist.testing._training import Training, largest_error


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_sample_of_a_batch_is_on_one_rank(size: int) -> None:
    training = Training(steps=3, batch=12)
    shares = [list(training.shares(rank, size)) for rank in range(size)]
    samples = np.arange(36)
    for step in range(3):
        together = np.concatenate([samples[own[step]] for own in shares])
        assert together.tolist() == list(range(12 * step, 12 * (step + 1)))


def test_one_process_takes_a_whole_window_at_once() -> None:
    training = Training("adamw", steps=8, passes=4, mode="fit", flush=True)
    assert training.concatenated() == Training("adamw", steps=2, batch=48, passes=1, mode="fit")
    for found, expected in zip(training.concatenated().data(6, 3), training.data(6, 3), strict=True):
        np.testing.assert_array_equal(found, expected)


class Recorded:
    """A framework's half of the suite that notes how it was called."""

    modes = ("eager", "function")

    def __init__(self) -> None:
        self.modes_used: list[str] = []
        self.train_options: list[dict[str, Any]] = []

    def train(self, training: Training, **options: Any) -> dict[str, Any]:
        self.modes_used.append(training.mode)
        self.train_options.append(options)
        return {}


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setattr(_training, "_module", lambda name: recorded)
    return recorded


def test_the_first_mode_is_the_usual_one(framework: Recorded) -> None:
    _training.train_alone("fake", Training())
    _training.train_alone("fake", Training(mode="function"), 1, 3)
    assert framework.modes_used == ["eager", "function"]
    assert framework.train_options[1] == {"distributed": False, "rank": 1, "size": 3}


def test_an_unknown_mode_is_refused_with_the_choices(framework: Recorded) -> None:
    with pytest.raises(ValueError, match=r"no mode 'fit'.*eager, function"):
        _training.train_alone("fake", Training(mode="fit"))
    assert not framework.modes_used


def test_a_framework_without_its_half_of_the_suite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(conformance="")
    manager = SimpleNamespace(frameworks={"bare": spec})
    monkeypatch.setattr(_training, "PluginManager", lambda: SimpleNamespace(load=lambda: manager))
    with pytest.raises(ValueError, match=r"'bare'.*FrameworkSpec\.conformance"):
        _training.train_alone("bare", Training())


def test_errors_are_relative_to_large_values_only() -> None:
    assert largest_error(np.array([1001.0, 0.5]), np.array([1000.0, 0.5])) == pytest.approx(1e-3)
    assert largest_error(np.array([0.1, 0.0]), np.array([0.0, 0.0])) == pytest.approx(0.1)
    assert largest_error(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0
