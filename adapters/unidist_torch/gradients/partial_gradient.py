"""The gradient of a parameter that is cut over ranks: its norms are those of the whole gradient.

So scripts that clip by `torch.nn.utils.clip_grad_norm_`, or compute norms themselves, get the numbers of one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unidist.communicator import ReduceOp
from unidist.errors import UsageError
from unidist_torch.memory import buffer_of

if TYPE_CHECKING:
    from unidist.communicator import Communicator

_VECTOR_NORMS = {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, torch.Tensor.norm}
_EUCLIDEAN = (None, "fro")  # of all elements together


class PartNorms:
    """Norms of gradients of which each rank along some axis has a part.

    Args:
        over: the ranks that have the parts; None: the model is divided along other axes too, and norms are refused.
    """

    def __init__(self, over: Communicator | None) -> None:
        self._over = over

    def whole(self, norms: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
        """Return norms of whole gradients, given those of this rank's parts, in their order. Collective."""
        own = torch.stack([norm.detach().double().cpu() for norm in norms])
        if math.isinf(order):
            found = self._reduced(own, ReduceOp.MAX)
        else:
            found = self._reduced(own**order, ReduceOp.SUM) ** (1.0 / order)
        return [number.to(norm.device, norm.dtype) for number, norm in zip(found, norms, strict=True)]

    def largest(self, number: torch.Tensor) -> torch.Tensor:
        """Return the largest of the ranks' numbers. Collective."""
        return self._reduced(number.detach().double().cpu().reshape(1), ReduceOp.MAX)[0].to(number)

    def _reduced(self, numbers: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        if self._over is None:
            raise _refusal("a norm")
        exchanged = buffer_of(numbers)
        self._over.allreduce(exchanged, exchanged, op=op).wait()
        return numbers


class PartialGradient(torch.Tensor):
    """This rank's part of a gradient. Made by `partial_gradient`.

    Norms are of the whole gradient, and collective over the ranks that have its parts. Results of the same shape are
    other parts. Sums and the like would be of this rank's part alone, and raise UsageError.
    """

    unidist_norms: PartNorms

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do as the class says; torch calls it for every use."""
        named = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            if func in _VECTOR_NORMS:
                return _norm(func, args, named)
            if func is torch._foreach_norm:
                return _norms_of_all(*args, **named)
            made = func(*args, **named)
            first = next(_parts_in((args, named)), None)
            if first is None:
                return made
            if func is torch._amp_foreach_non_finite_check_and_unscale_:  # of GradScaler: all ranks skip, or none
                found_inf = args[1]
                found_inf.fill_(first.unidist_norms.largest(found_inf))
                return made
            if not isinstance(made, torch.Tensor) or isinstance(made, PartialGradient):
                return made
            is_view = (
                made.numel() == first.numel()
                and made.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            )
            if made.shape != first.shape and not is_view:
                raise _refusal(f"{getattr(func, '__name__', func)}()")
            return partial_gradient(made, first.unidist_norms)


def partial_gradient(part: torch.Tensor, norms: PartNorms) -> torch.Tensor:
    """Return the same memory as part of a gradient."""
    made = part.as_subclass(PartialGradient)
    made.unidist_norms = norms
    return made


def plain_part(gradient: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a plain tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.as_subclass(torch.Tensor)


def _norm(func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> torch.Tensor:
    """Return the norm of all elements of a whole gradient."""
    part, *rest = args or (named.pop("input", named.pop("self", None)),)
    names = ("p" if func in (torch.norm, torch.Tensor.norm) else "ord", "dim", "keepdim")
    given = dict(zip(names, rest, strict=False)) | named
    order = given.get(names[0], 2.0)
    is_plain = given.get("dim") is None and not given.get("keepdim") and given.get("out") is None
    order = 2.0 if order in _EUCLIDEAN else order
    if not isinstance(part, PartialGradient) or not is_plain or not isinstance(order, int | float) or not order > 0:
        raise _refusal(f"{func.__name__}() with {named or list(rest)}")
    own = torch.linalg.vector_norm(part, float(order), dtype=given.get("dtype"))
    return part.unidist_norms.whole([own], float(order))[0]


def _norms_of_all(tensors: Sequence[torch.Tensor], order: float = 2.0, dtype: Any = None) -> list[torch.Tensor]:
    """Return the norms of tensors, some of which are parts, with one exchange."""
    found = [torch.linalg.vector_norm(each, float(order), dtype=dtype) for each in tensors]
    places = [place for place, each in enumerate(tensors) if isinstance(each, PartialGradient)]
    norms: Any = tensors[places[0]]
    if not order > 0:
        raise _refusal(f"_foreach_norm() of order {order}")
    whole = norms.unidist_norms.whole([found[place] for place in places], float(order))
    for place, each in zip(places, whole, strict=True):
        found[place] = each
    return found


def _parts_in(value: Any) -> Iterator[PartialGradient]:
    if isinstance(value, PartialGradient):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _parts_in(each)
    elif isinstance(value, dict):
        yield from _parts_in(list(value.values()))


def _refusal(what: str) -> UsageError:
    return UsageError(
        f"{what} was asked of the gradient of a parameter that is cut over ranks: each has a part of it. Element-wise "
        "operations work, and so do torch.nn.utils.clip_grad_norm_ and other norms of all of its elements, called on "
        "every rank. To clip use ud.clip_grad_norm_(optimizer, max_norm) or --strategy clip_norm=1"
    )
