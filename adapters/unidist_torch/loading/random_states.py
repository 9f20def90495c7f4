"""Separate states of the global random generators, for code that must draw the same on every rank."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

_STEP = 15_485_863  # between the seeds of two parts: far from the seeds of the next epochs
_LIMIT = 2**32  # numpy's seeds are below it


class RandomStates:
    """Within `with`, the generators of Python, numpy and PyTorch (CPU) go on from where the last `with` left them.

    The first one begins with the seed. Outside, they are as if nothing had been drawn.

    Args:
        seed: of all three.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: tuple[Any, ...] | None = None
        self._outside: tuple[Any, ...] = ()

    def seed_part(self, part: int) -> None:
        """Let the next `with` begin with another seed: that of a part of the data."""
        self._seed += _STEP * part
        self._inside = None

    def __enter__(self) -> None:
        self._outside = _states()
        if self._inside is None:
            _seed(self._seed % _LIMIT)
        else:
            _restore(self._inside)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = _states()
        _restore(self._outside)


@contextmanager
def as_before() -> Iterator[None]:
    """Leave the generators as if nothing had been drawn within `with`."""
    states = _states()
    try:
        yield
    finally:
        _restore(states)


def _numpy() -> Any:
    return sys.modules.get("numpy")


def _states() -> tuple[Any, ...]:
    numpy = _numpy()
    return random.getstate(), torch.get_rng_state(), None if numpy is None else numpy.random.get_state()


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    if states[2] is not None:
        _numpy().random.set_state(states[2])


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs, too
    if _numpy() is not None:
        _numpy().random.seed(seed)
