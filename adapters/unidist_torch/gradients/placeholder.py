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
    """

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
        raise UsageError(
            "the values of p.grad were asked for, but the strategy shards gradients: each rank holds some of them, "
            "elsewhere. To clip use ud.clip_grad_norm_(optimizer, max_norm), which works with every strategy, or "
            "--strategy clip_norm=1"
        )


def sharded_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return the placeholder for the gradient of `parameter`; it takes no memory."""
    return parameter.new_zeros(()).expand(parameter.shape).as_subclass(ShardedGradient)
