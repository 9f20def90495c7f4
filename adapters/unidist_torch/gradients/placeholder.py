"""The placeholder in `p.grad` of a gradient that is sharded over the ranks: it cannot be used by mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unidist.errors import UsageError

_DESCRIBING = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "is_sparse", "requires_grad", "grad_fn", "is_leaf", "ndim")
)


class ShardedGradient(torch.Tensor):
    """A gradient whose shard is elsewhere. Its shape and type can be read; its values raise UsageError.

    Without it a script that clips by `torch.nn.utils.clip_grad_norm_` would clip nothing, in silence.

    Autograd adds the gradient of another backward pass to `p.grad`, below `__torch_function__`: the placeholder keeps
    it in `added`, for the hook that follows.

    Attributes:
        added: the gradient of another backward pass; None: there was none.
    """

    added: torch.Tensor | None = None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse all uses but those of `_DESCRIBING`; torch calls it for every use."""
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _refusal()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own has no types
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Take what autograd adds; torch calls it for uses that do not come from Python."""
        if func is torch.ops.aten.add_.Tensor and isinstance(args[0], cls):
            args[0].added = args[1]
            return args[0]
        if func is torch.ops.aten.add.Tensor and isinstance(args[0], cls):  # with create_graph
            return args[1]
        raise _refusal()


def sharded_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the placeholder for the gradient of `parameter`; it takes no memory."""
    with torch._C.DisableTorchFunctionSubclass():  # the parameter may be of a class that is asked for each attribute
        made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
            ShardedGradient, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
    return made


def _refusal() -> UsageError:
    return UsageError(
        "the values of p.grad were asked for, but the strategy shards gradients: each rank holds some of them, "
        "elsewhere. To clip use ud.clip_grad_norm_(optimizer, max_norm), which works with every strategy, or "
        "--strategy clip_norm=1"
    )
