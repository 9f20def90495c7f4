"""Blocks of PyTorch: replaces the `forward` of modules. Paths, hooks and state dictionaries stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, ClassVar

import torch
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from unidist.errors import ConfigurationError
from unidist_activations._blocks import ModelMember, Path
from unidist_activations._files import FileMemory
from unidist_activations._torch_offload import FileStore, HostStore, Offload
from unidist_activations.binding import ModelBinding
from unidist_torch.models import leave_out

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
_PLAIN = "_unidist_plain_forward"

Forward = Callable[..., Any]


class TorchModelBinding(ModelBinding):
    """See `ModelBinding`."""

    separator: ClassVar[str] = "."

    @override
    def members(self, model: torch.nn.Module) -> Sequence[ModelMember]:
        return [
            ModelMember(
                tuple(path.split(".")),
                f"{type(module).__module__}.{type(module).__qualname__}",
                has_members=any(True for _ in module.children()),
                is_container=isinstance(module, (*_LISTS, torch.nn.Sequential)),
                is_callable=not isinstance(module, _LISTS),
            )
            for path, module in model.named_modules()
            if path
        ]

    @override
    def recompute(self, model: torch.nn.Module, blocks: Sequence[Path]) -> None:
        for path in blocks:
            _run_by(_recomputing, model.get_submodule(".".join(path)))

    @override
    def offload(self, model: torch.nn.Module, blocks: Sequence[Path], *, path: str | None, rank: int) -> None:
        modules = [model.get_submodule(".".join(block)) for block in blocks]
        if path is None:
            devices = {parameter.device.type for module in modules for parameter in module.parameters()}
            if "cpu" in devices:
                raise ConfigurationError(
                    f"activations=offload moves activations to host memory, and on rank {rank} the model is there "
                    "already (device cpu). Move the model to its accelerator before distribute, or give a folder "
                    "on a disk, activations=offload:path=FOLDER, or use activations=recompute"
                )
        store = HostStore() if path is None else FileStore(FileMemory(path, rank=rank))
        for module in modules:
            _run_by(functools.partial(_offloading, Offload(store)), module)


def _run_by(run: Callable[..., Any], module: torch.nn.Module) -> None:
    """Make `run(plain, module, *args, **kwargs)` the module's forward; `plain` is what it was before any strategy."""
    own = vars(module).pop("forward", None)
    plain: Forward
    if own is None:
        plain = type(module).forward
    elif hasattr(own, _PLAIN):  # of an earlier `distribute`
        plain = getattr(own, _PLAIN)
    else:  # of the script's own

        def plain(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

    # A method of the module, not a function that holds it: copies of the module then run themselves.
    @functools.wraps(plain)
    def forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(plain, module, *args, **kwargs)

    setattr(forward, _PLAIN, plain)
    module.forward = MethodType(forward, module)
    leave_out(module, _without_forward, copies=False)


def _without_forward(state: dict[str, Any]) -> None:
    if hasattr(state.get("forward"), _PLAIN):
        del state["forward"]


def _recomputing(plain: Forward, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a block and keep its inputs only; random numbers and autocast are the same when it runs again."""
    if not torch.is_grad_enabled():
        return plain(module, *args, **kwargs)
    if any(True for _ in module.buffers()):
        kwargs["context_fn"] = functools.partial(_contexts, module)
    return checkpoint(plain, module, *args, use_reentrant=False, **kwargs)


def _contexts(module: torch.nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return nullcontext(), _BuffersStay(module)


class _BuffersStay:
    """Runs a block on copies of its buffers: a batch norm's statistics have seen this batch already.

    A graph whose backward pass runs in several parts, or twice (`retain_graph=True`), enters it as often.

    Args:
        module: the block.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._kept: list[list[tuple[torch.nn.Module, str, torch.Tensor]]] = []

    def __enter__(self) -> None:
        kept = [
            (part, name, buffer)
            for part in self._module.modules()
            for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False)
        ]
        self._kept.append(kept)
        for part, name, buffer in kept:
            setattr(part, name, buffer.clone())

    def __exit__(self, *error: object) -> None:
        for part, name, buffer in self._kept.pop():
            setattr(part, name, buffer)


def _offloading(offload: Offload, plain: Forward, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a block, and keep what its backward pass needs outside of the device."""
    if not torch.is_grad_enabled():
        return plain(module, *args, **kwargs)
    with offload.of(module):
        return plain(module, *args, **kwargs)
