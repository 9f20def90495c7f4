"""Models that PyTorch's own wrappers (`DistributedDataParallel`, FSDP) distribute as well: refused, both ways round."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel, DistributedDataParallel

from unidist.errors import UsageError

_REASON = "Gradients would be averaged twice, also over ranks that hold parts of one model."


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Raise UsageError if a wrapper of PyTorch's is around the model, or around a module within it."""
    for path, module in model.named_modules():
        if _distributes(module):
            raise UsageError(
                f"{f'{path!r} of the model' if path else 'the model'} is wrapped in {type(module).__name__}. {_REASON} "
                "Give distribute() the model itself, and the optimizer over its parameters"
            )


_distributed: dict[int, weakref.ref[torch.nn.Module]] = {}
"""The models that unidist distributes, by `id`: their classes need not be hashable."""


def refuse_wrapping(model: torch.nn.Module) -> None:
    """Let wrappers of PyTorch's raise UsageError for the model, and for modules that contain it.

    Copies and pickles of the model are plain.
    """
    _watch_wrappers()
    _distributed[id(model)] = weakref.ref(model)
    weakref.finalize(model, _distributed.pop, id(model), None)


@functools.cache
def _watch_wrappers() -> None:
    """Look at what wrappers wrap: they store it in an attribute, which calls a hook.

    One hook, which stays: models are collected at any time, and removing a hook while PyTorch goes through them is an
    error in the script's line that makes a module.
    """
    register_module_module_registration_hook(_refuse)


def _refuse(wrapper: torch.nn.Module, name: str, wrapped: torch.nn.Module | None) -> None:
    del name
    if wrapped is None or not _distributes(wrapper):
        return
    path = next((path for path, module in wrapped.named_modules() if _is_distributed(module)), None)
    if path is not None:
        subject = f"{path!r} of what {type(wrapper).__name__} wraps" if path else "the model"
        again = f", and now {type(wrapper).__name__} wraps it as well" if not path else ""
        raise UsageError(
            f"{subject} is distributed by unidist{again}. "
            f"{_REASON} Leave it out. Where accelerate or Hugging Face's Trainer does it, take RANK, LOCAL_RANK "
            "and WORLD_SIZE out of os.environ after ud.init(), and docs/coming-from.md has the rest"
        )


def _is_distributed(module: torch.nn.Module) -> bool:
    model = _distributed.get(id(module))
    return model is not None and model() is module


def _distributes(module: torch.nn.Module) -> bool:
    """Return whether a module is one of PyTorch's wrappers. Their FSDP is not imported for it: that takes seconds."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return isinstance(module, (DistributedDataParallel, DataParallel)) or (
        fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)
    )
