"""The rank side of random programs: one training, and its outcome as plain data."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _model_programs import Program

from unidist.errors import ConfigurationError, MismatchError, UsageError
from unidist.settings.environment import set_variables


@dataclass(frozen=True)
class Piece:
    """Values of a parameter.

    Args:
        name: in the whole model.
        indices: of each dim of the whole parameter, those that are here; None: all.
        value: the elements.
    """

    name: str
    indices: Sequence[Any] | None
    value: np.ndarray[Any, Any]


Pieces = list[Piece]


@dataclass(frozen=True)
class Trained:
    """A training that came to its end.

    Args:
        losses: of each update.
        pieces: the parameters of this rank.
    """

    losses: tuple[float, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Raised:
    """A training that raised.

    Args:
        kind: the exception's class.
        text: its text.
        trace: its traceback.
        updates: how many came before it.
        says_so: it is an error by which unidist refuses a script or a command.
    """

    kind: str
    text: str
    trace: str
    updates: int
    says_so: bool

    @property
    def place(self) -> str:
        """The line that raised."""
        lines = [line.strip() for line in self.trace.splitlines() if line.strip().startswith("File ")]
        return lines[-1].replace('"', "").rpartition("/")[2] if lines else ""


def _outcome(training: Generator[float, None, Pieces]) -> Trained | Raised:
    losses: list[float] = []
    try:
        while True:
            losses.append(next(training))
    except StopIteration as end:
        return Trained(tuple(losses), tuple(end.value))
    except Exception as error:
        return _raised(error, len(losses))


def _raised(error: Exception, updates: int) -> Raised:
    says_so = isinstance(error, UsageError | ConfigurationError) and not isinstance(error, MismatchError)
    trace = "".join(traceback.format_exception(error))
    return Raised(type(error).__name__, str(error), trace, updates, says_so)


def _module(program: Program) -> Any:
    return importlib.import_module(f"_{program.framework}_random")


def alone(program: Program, *, pieces: int = 1) -> Trained | Raised:
    """Train in this process, without unidist; `pieces`: see the frameworks' modules."""
    return _outcome(_module(program).alone(program, pieces=pieces))


def on_rank(program: Program, number: int, folder: str) -> Trained | Raised:
    """Train job `number` of a program on this rank of a pool."""
    job = program.jobs[number]
    module = _module(program)
    verify = "first" if program.verify else "off"
    with set_variables({"UNIDIST_STRATEGY": job.strategy, "UNIDIST_ENGINE": job.engine, "UNIDIST_VERIFY": verify}):
        try:
            module.ud.init()
        except Exception as error:
            return _raised(error, 0)
        found = _outcome(module.on_rank(program, number, folder))
        try:
            module.ud.shutdown()
        except Exception as error:
            if isinstance(found, Trained):
                return _raised(error, len(found.losses))
        return found
