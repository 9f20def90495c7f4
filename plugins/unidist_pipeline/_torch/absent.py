"""A placeholder for a parameter that other ranks of a pipeline hold: using it raises an error that says where it is.

torch finds no parameter there, as in a module without a bias: not in `parameters()`, and not in `state_dict()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from typing_extensions import override

from unidist.errors import UsageError

_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv pow rpow matmul rmatmul neg abs iadd isub imul itruediv getitem setitem
    len iter float int lt le gt ge
"""


class AbsentParameterError(UsageError, AttributeError):
    """Also an AttributeError: `hasattr` is False."""


class AbsentAttribute:
    """Is an attribute of a module in place of the parameter.

    Args:
        name: of the parameter.
        where: "stage 1, rank 1 of the pipeline".
        rank: of this process in the pipeline.
    """

    def __init__(self, name: str, where: str, rank: int) -> None:
        self._name = name
        self._where = where
        self._rank = rank

    @override
    def __repr__(self) -> str:
        return f"Parameter {self._name!r}, which is elsewhere ({self._where})"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._error(f".{name}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Refuse every function of torch."""
        raise next(_found_in((args, kwargs or {})))._error(f"{getattr(func, '__name__', func)}()")

    def _error(self, use: str) -> UsageError:
        return AbsentParameterError(
            f"{use} was asked of parameter {self._name!r} on rank {self._rank} of the pipeline, which has not got it: "
            f"it is on {self._where}. model.named_parameters() gives those of this rank, whose norms and the like "
            "ud.allreduce sums up, and ud.save(path, model) writes those of all ranks"
        )


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: AbsentAttribute, *args: Any) -> NoReturn:
        raise self._error(f"{name}()")

    return refuse


for _operator in _OPERATORS.split():
    setattr(AbsentAttribute, f"__{_operator}__", _refusing(f"__{_operator}__"))


def _found_in(value: Any) -> Iterator[AbsentAttribute]:
    if isinstance(value, AbsentAttribute):
        yield value
    elif isinstance(value, Mapping):
        yield from _found_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _found_in(each)


def say_absent(module: torch.nn.Module, name: str, absent: AbsentAttribute) -> None:
    """Put it into a module that has None for the parameter. A script that assigns a parameter replaces it."""
    module.__dict__[name] = absent


@contextmanager
def nothing_absent(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the block modules are without these attributes."""
    taken = [
        (module, {name: value for name, value in vars(module).items() if isinstance(value, AbsentAttribute)})
        for module in dict.fromkeys(modules)
    ]
    for module, found in taken:
        for name in found:
            del module.__dict__[name]
    try:
        yield
    finally:
        for module, found in taken:
            module.__dict__.update(found)
