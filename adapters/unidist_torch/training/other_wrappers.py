"""Models that PyTorch's own `DistributedDataParallel` distributes as well: refused, both ways round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from unidist.errors import UsageError

_REASON = "Gradients would be averaged twice, also over ranks that hold parts of one model."


class RefusesToBeWrapped:
    """What `DistributedDataParallel` finds where it looks for the parameters that it should ignore.

    Copies and pickles of the model are plain: there it is an empty tuple.
    """

    def __iter__(self) -> Iterator[str]:
        """Raise UsageError."""
        raise UsageError(
            "the model is distributed by unidist, and now DistributedDataParallel wraps it as well. "
            f"{_REASON} Leave it out. Where accelerate or Hugging Face's Trainer does it, take RANK, LOCAL_RANK and "
            "WORLD_SIZE out of os.environ after ud.init(), and docs/coming-from.md has the rest"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to what needs no unidist to be loaded."""
        return tuple, ()


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Raise UsageError if `DistributedDataParallel` wraps the model, or a module within it."""
    for path, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise UsageError(
                f"{f'{path!r} of the model' if path else 'the model'} is wrapped in DistributedDataParallel. {_REASON} "
                "Give distribute() the model itself, and the optimizer over its parameters"
            )


def refuse_wrapping(model: torch.nn.Module) -> None:
    """Let `DistributedDataParallel(model)` raise UsageError."""
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = RefusesToBeWrapped()
