"""Runs one table of cases with Horovod and with unidist on the same ranks, and compares what they did.

A case is a function of the library, `hvd`. Its outcome on each rank is what it returned, with types and shapes, or the
exception that it raised. Outcomes agree if values, dtypes, shapes and containers do, and if ours can be caught as the
exception that Horovod raised. What reads or writes no other state than its own arguments may be a case.
"""

from __future__ import annotations

import importlib
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unidist.settings.environment import set_variables

_ACCIDENTS = {"AttributeError", "IndexError", "TypeError", "UnboundLocalError", "ValueError"}
"""Python's errors where Horovod does not look at an argument: nobody catches one of them and not the others."""

_TRACES = "COMPAT_TRACES" in os.environ
"""For a case that hangs or fails: say which begins, and keep whole tracebacks."""

Outcome = Any
"""What a case did, of plain values: `plain` of what it returned, or `Raised`."""


@dataclass(frozen=True)
class Raised:
    """An exception.

    Args:
        kinds: the names of its class and of the classes that this one inherits from.
        text: its message, for reports.
    """

    kinds: tuple[str, ...]
    text: str = field(compare=False)

    def __repr__(self) -> str:
        return f"{self.kinds[0]}({self.text[:300]!r})"


@dataclass(frozen=True)
class Case:
    """A function of the library, and what is known of it.

    Args:
        name: of the function, with its arguments.
        function: called with the library.
        differs: why unidist's outcome is another one, and should be; "" if it is the same.
        alone: Horovod does not run it: it would hang, or end the process.
        ours: unidist's outcome on each rank, where it differs: an exception, or a function that checks the value.
    """

    name: str
    function: Callable[[Any], Any]
    differs: str = ""
    alone: bool = False
    ours: type[BaseException] | Callable[[Any], bool] | None = None


class Table:
    """The cases of a module, in their order, which is that of all ranks."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def case(self, *rows: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add the function as a case; with `rows` one case for each, which gets it as its further arguments."""
        return self._add(rows)

    def differs(
        self, reason: str, ours: Any, *rows: Any, alone: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add a case in which unidist does something else, and should.

        Args:
            reason: why.
            ours: the exception that unidist raises, or a function that says whether its value is the right one.
            *rows: see `case`.
            alone: Horovod is not asked, as it would hang or end the process.
        """
        return self._add(rows, differs=reason, ours=ours, alone=alone)

    def _add(self, rows: Sequence[Any], **known: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            for row in rows or [()]:
                arguments = row if isinstance(row, tuple) else (row,)
                shown = f"({', '.join(_shown(each) for each in arguments)})" if rows else ""
                self.cases.append(Case(function.__name__ + shown, _bound(function, arguments), **known))
            return function

        return add

    def named(self, name: str) -> Case:
        """Return the case of this name."""
        (found,) = (case for case in self.cases if case.name == name)
        return found


def _bound(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    return lambda hvd: function(hvd, *arguments)


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or getattr(value, "name", None) or str(value)


# On a rank


def outcomes(module: str, library: str, engine: str, only: str = "") -> dict[str, Outcome]:
    """Start a library on this rank, and return what it did in each case of a module; collective.

    Args:
        module: of the cases, with the attribute `TABLE`.
        library: `horovod.torch`, `unidist.torch`, ...
        engine: over which unidist runs. Horovod is started by the engine of its name, and then called directly.
        only: a part of the names of the cases to run; "" for all.
    """
    import unidist.runtime.context as context

    os.environ.pop("HOROVOD_ELASTIC", None)
    table: Table = importlib.import_module(module).TABLE
    is_horovod = library.startswith("horovod.")
    found = {}
    variables = {"UNIDIST_ENGINE": engine, "UNIDIST_TIMEOUT_SEC": "20"}
    if is_horovod:
        variables |= {"UNIDIST_ENGINE": "horovod", "HOROVOD_TIMELINE": "DYNAMIC"}  # timelines that are started later
    with set_variables(variables):
        runtime = context.init()
        try:
            hvd = importlib.import_module(library)
            if is_horovod:
                hvd.init(process_sets="dynamic")
            for case in table.cases:
                if _TRACES:
                    print(f"{time.monotonic():.3f} {library}: {case.name}", flush=True)
                if only in case.name and not (is_horovod and case.alone):
                    found[case.name] = attempt(case.function, hvd)
                    runtime.world.barrier().wait()
        finally:
            context.shutdown()
    return found


def attempt(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """Return what a call did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return plain(function(*arguments))
        except Exception as exc:
            if isinstance(exc, _OF_THE_CASE) and is_of_a_case(exc):
                line = traceback.extract_tb(exc.__traceback__)[-1]
                raise CaseError(f"{line.name}, line {line.lineno}, raised {type(exc).__name__}({exc})") from exc
            text = traceback.format_exc() if _TRACES else str(exc)
            return Raised(tuple(kind.__name__ for kind in type(exc).__mro__), text)


class CaseError(BaseException):
    """A case is wrong: it raised an error of its own, with both libraries, so it could not fail."""


_OF_THE_CASE = (NameError, NotImplementedError, AssertionError, SyntaxError)


def is_of_a_case(exc: BaseException) -> bool:
    """Return whether an exception was raised by a line of a table of cases, and not by what that called."""
    innermost = traceback.extract_tb(exc.__traceback__)[-1].filename
    return os.path.basename(innermost).endswith("_cases.py")


def tells_of_threads(hvd: Any, asked: Callable[[], Any]) -> bool:
    """Return whether `mpi_threads_supported` answers as Horovod's: over MPI with a bool, else by a ValueError."""
    found = attempt(asked)
    return isinstance(found, bool) if hvd.mpi_enabled() else isinstance(found, Raised) and "ValueError" in found.kinds


def plain(value: Any) -> Any:
    """Return a value in plain types, so that those of different libraries can be compared in another process."""
    if value is None or isinstance(value, bool | str | Raised):
        return value
    if isinstance(value, int | float) and not hasattr(value, "dtype"):
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, *(plain(item) for item in value))
    if hasattr(value, "dtype"):
        return _tensor(value)
    return f"<{type(value).__name__}>"


def _tensor(value: Any) -> Any:
    dtype = str(getattr(value.dtype, "name", value.dtype)).removeprefix("torch.")
    if getattr(value, "is_sparse", False):
        merged = value.detach().coalesce()
        return ("sparse", dtype, tuple(value.shape), merged.indices().tolist(), merged.values().tolist())
    if type(value).__name__ == "IndexedSlices":
        return ("slices", dtype, plain(value.values), plain(value.indices))
    kind = "tensor" if hasattr(value, "shape") and not type(value).__module__.startswith("numpy") else "array"
    if hasattr(value, "detach"):
        content = value.detach().double() if dtype == "bfloat16" else value.detach()
        return (kind, dtype, tuple(value.shape), content.tolist(), bool(value.requires_grad))
    if hasattr(value, "numpy"):
        return (kind, dtype, tuple(value.shape), value.numpy().tolist())
    return (kind, dtype, tuple(value.shape), value.tolist())


# Comparing


def differences(table: Table, theirs: Sequence[dict[str, Outcome]], ours: Sequence[dict[str, Outcome]]) -> list[str]:
    """Return a line for each case and rank in which unidist did not do what the table says."""
    found = []
    for case in table.cases:
        for rank, mine in enumerate(ours):
            if case.name in mine:
                wanted = theirs[rank].get(case.name)
                if problem := _problem(case, wanted, mine[case.name]):
                    found.append(f"{case.name}, rank {rank}: {problem}")
    return found


def _problem(case: Case, theirs: Outcome, ours: Outcome) -> str:
    if not case.differs:
        return "" if same(theirs, ours) else _where(theirs, ours)
    if not case.alone and same(theirs, ours):
        return f"both: {ours!r}; the table says that they differ ({case.differs})"
    if isinstance(case.ours, type):
        is_right = isinstance(ours, Raised) and case.ours.__name__ in ours.kinds
    else:
        assert case.ours is not None
        is_right = not isinstance(ours, Raised) and case.ours(ours)
    return "" if is_right else f"not as the table says: {ours!r} ({case.differs})"


def _where(theirs: Outcome, ours: Outcome, path: str = "") -> str:
    """Return the innermost values that differ, of the first that do."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        pairs = [(key, theirs[key], ours[key]) for key in theirs]
    elif isinstance(theirs, tuple) and isinstance(ours, tuple) and theirs[:1] == ours[:1] and len(theirs) == len(ours):
        pairs = [(index, *pair) for index, pair in enumerate(zip(theirs, ours, strict=True))]
    else:
        pairs = []
    is_tensor = isinstance(theirs, tuple) and theirs[:1] == ("tensor",)
    for key, one, other in [] if is_tensor else pairs:
        if not same(one, other):
            return _where(one, other, f"{path}[{key!r}]")
    return f"{path} Horovod: {theirs!r}; unidist: {ours!r}"


def same(theirs: Outcome, ours: Outcome) -> bool:
    """Return whether two outcomes agree; an exception of ours may be of more kinds than Horovod's."""
    if isinstance(theirs, Raised) or isinstance(ours, Raised):
        if not isinstance(theirs, Raised) or not isinstance(ours, Raised):
            return False
        wanted = _ACCIDENTS if theirs.kinds[0] in _ACCIDENTS - {"ValueError"} else {theirs.kinds[0]}
        return not wanted.isdisjoint(ours.kinds)
    if isinstance(theirs, float) and isinstance(ours, float):
        return math.isclose(theirs, ours, rel_tol=2e-6, abs_tol=1e-7) or (math.isnan(theirs) and math.isnan(ours))
    if isinstance(theirs, tuple) and isinstance(ours, tuple) and theirs[:2] in (("tensor", "float16"),):
        return theirs[:3] == ours[:3] and all(
            math.isclose(a, b, rel_tol=2e-3, abs_tol=1e-3) or (math.isnan(a) and math.isnan(b)) or a == b
            for a, b in zip(_leaves(theirs[3]), _leaves(ours[3]), strict=True)
        )
    if isinstance(theirs, list | tuple) and type(theirs) is type(ours):
        return len(theirs) == len(ours) and all(map(same, theirs, ours))
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return theirs.keys() == ours.keys() and all(same(theirs[key], ours[key]) for key in theirs)
    return type(theirs) is type(ours) and theirs == ours


def _leaves(value: Any) -> Iterator[float]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield float(value)
