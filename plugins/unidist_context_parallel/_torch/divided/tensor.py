"""`SequenceTensor`: a tensor whose rows along one dim are divided over ranks, with the shape of the whole one.

What a model does with it is intercepted before autograd sees it (`__torch_function__`): a rule, by the operation's
name, computes on this rank's rows, so that autograd records plain operations on plain tensors. Plain tensors are whole,
and equal on all ranks; where one meets a divided tensor along the divided dim, its rows at the same positions are
taken. An operation without a rule raises an error.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ClassVar, NoReturn

import torch

from unidist.errors import UsageError
from unidist_context_parallel._torch.divided.axis import ContextAxis, take_rows
from unidist_context_parallel.layout.sequence import SequenceLayout

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

RULES: dict[str, Rule] = {}
"""By the name of an operation. `rules` fills it."""

_log = logging.getLogger("unidist")


class SequenceTensor(torch.Tensor):
    """A tensor of which this rank has some rows along one dim.

    Args:
        local: this rank's rows, in ascending order.
        dim: that is divided, from 0.
        layout: which row is where.
        axis: the ranks.

    Attributes:
        shape: of the whole tensor.
    """

    local: torch.Tensor
    dim_divided: int
    rows: SequenceLayout
    axis: ContextAxis
    _shape: torch.Size

    __slots__: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def __new__(cls, local: torch.Tensor, dim: int, layout: SequenceLayout, axis: ContextAxis) -> SequenceTensor:
        assert local.shape[dim] == layout.counts[axis.rank], (local.shape, dim, layout.counts)
        shape = torch.Size((*local.shape[:dim], layout.size, *local.shape[dim + 1 :]))
        made: SequenceTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        made.local, made.dim_divided, made.rows, made.axis, made._shape = local, dim, layout, axis, shape
        return made

    def __init__(self, *args: Any) -> None:
        """See the class."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]  # without a dispatch: models ask for it all the time
        return self._shape

    def full_tensor(self) -> torch.Tensor:
        """Return the whole tensor, on every rank of the axis. Collective over it. Differentiable."""
        return self.axis.gathered(self.local, self.rows, self.dim_divided)

    def like(self, local: torch.Tensor, dim: int | None = None, layout: SequenceLayout | None = None) -> SequenceTensor:
        """Return another divided tensor of the same ranks."""
        chosen = self.dim_divided if dim is None else dim
        return SequenceTensor(local, chosen, self.rows if layout is None else layout, self.axis)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]  # torch's takes contents of another form
        return (
            f"SequenceTensor(shape={tuple(self._shape)}, dim {self.dim_divided} divided over {self.axis.size} ranks, "
            f"dtype={self.local.dtype})"
        )

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(whole(self), spec) if spec else repr(self)

    def __len__(self) -> int:
        return self._shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def __deepcopy__(self, memo: Any) -> SequenceTensor:
        return self.like(self.local.detach().clone())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError("a tensor that is divided over ranks cannot be pickled; take unidist.torch.context.whole(x)")

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, SequenceLayout, ContextAxis]]:
        """See `torch.utils._python_dispatch`: the tensors in it, and the rest."""
        return ["local"], (self.dim_divided, self.rows, self.axis)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], meta: tuple[int, SequenceLayout, ContextAxis], size: Any, stride: Any
    ) -> SequenceTensor:
        """Make it again, of a tensor with as many dims."""
        return SequenceTensor(inner["local"], *meta)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        rule = RULES.get(name)
        if rule is None:
            refuse(func, "has no rule for a divided sequence")
        if kwargs.get("out") is not None:
            refuse(func, "writes to out=")
        return rule(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a static method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below `__torch_function__` nothing may arrive: there would be no values to read."""
        refuse(func, "was reached past the rules")


def name_of(func: Callable[..., Any]) -> str:
    """Return the name by which rules are found: `add` of torch.add, Tensor.add, aten.add.Tensor; `get shape`."""
    name: str | None = _names.get(func)
    if name is None:
        name = getattr(func, "__name__", type(func).__name__)
        if name in ("__get__", "__set__"):
            name = f"{name.strip('_')} {getattr(func, '__self__', func).__name__}"
        else:
            name = name.partition(".")[0]
        _names[func] = name
    return name


_names: dict[Any, str] = {}


def whole(value: Any) -> Any:
    """Return a divided tensor's whole one; anything else as it is."""
    return value.full_tensor() if isinstance(value, SequenceTensor) else value


def check_followed(tensor: SequenceTensor) -> None:
    """Raise if a tensor came out of an `autograd.Function`: its rows have lost their gradients there."""
    with torch._C.DisableTorchFunctionSubclass():
        made_by = tensor.grad_fn
    if made_by is not None:
        refuse(type(made_by), "is an autograd.Function, whose backward pass cannot be followed")


def refuse(func: Any, why: str) -> NoReturn:
    """Raise the error about an operation that cannot be followed."""
    raise UsageError(
        f"context: {_described(func)}{_place()} {why}. Use torch.nn.functional.scaled_dot_product_attention for "
        "attention; gather what it needs by unidist.torch.context.whole(x), or say that each token is computed by "
        "itself: unidist.torch.context.each_token(function). Or train without the strategy context"
    )


def gathers(func: Any, why: str, axis: ContextAxis) -> None:
    """Say once for each place, on rank 0, that all ranks compute something with all tokens."""
    text = f"context: {_described(func)}{_place()} {why}: every rank gathers all tokens for it"
    if text not in _said:
        _said.add(text)
        if axis.is_first_rank:
            _log.warning("%s", text)


_said: set[str] = set()


def _described(func: Any) -> str:
    if isinstance(func, type):
        return func.__name__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.overrides.resolve_name(func)
    return found or name_of(func)


def _place() -> str:
    """Return where in the model this is called, from the modules on the stack."""
    frame: FrameType | None = sys._getframe(1)
    modules: list[torch.nn.Module] = []
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and (not modules or modules[-1] is not module):
            modules.append(module)
        frame = frame.f_back
    if not modules:
        return ""
    paths = {id(module): path for path, module in modules[-1].named_modules()}
    path = paths.get(id(modules[0]), "")
    return f" in {path!r} ({type(modules[0]).__name__})" if path else f" in {type(modules[0]).__name__}"


def align(value: Any, reference: SequenceTensor, dim: int) -> Any:
    """Return this rank's rows of an operand that is broadcast with a divided one.

    Args:
        value: a tensor, or anything else, which is returned as it is.
        reference: a divided tensor; its layout is that of the result.
        dim: the divided dim of the result, from the end (negative).
    """
    if not isinstance(value, torch.Tensor):
        return value
    layout, axis = reference.rows, reference.axis
    if isinstance(value, SequenceTensor):
        check_followed(value)
        if value.dim_divided - value.local.ndim == dim and value.rows is layout:
            return value.local
        value = value.full_tensor()
    if value.ndim < -dim or value.shape[dim] == 1:
        return value
    if value.shape[dim] != layout.size:
        raise RuntimeError(
            f"The size of tensor a ({layout.size}) must match the size of tensor b ({value.shape[dim]}) at "
            f"non-singleton dimension {value.ndim + dim}"
        )
    return take_rows(value, layout, dim, axis.rank)
