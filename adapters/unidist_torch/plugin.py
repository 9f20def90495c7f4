"""The plugin of the PyTorch adapter: registers its engines and its framework. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist import hookimpl
from unidist.engine import EngineSpec
from unidist.framework import FrameworkSpec
from unidist.registry import Registry
from unidist_torch import file_names
from unidist_torch.file_names import FileNamesSpec

if TYPE_CHECKING:
    from unidist.runtime.plugin_manager import PluginManager


@hookimpl
def unidist_add_kinds(manager: PluginManager) -> None:
    """Let plugins register the names of tensors in a library's files."""
    manager.add_kind(FileNamesSpec, file_names)


@hookimpl
def unidist_register_engines(registry: Registry[EngineSpec]) -> None:
    """Register `gloo` and `nccl`."""
    registry.add(
        EngineSpec(
            "gloo",
            "unidist_torch.engines.engine:GlooEngine",
            "torch.distributed's gloo over TCP; carries CUDA tensors through host memory",
            memory_kinds=frozenset(("host", "cuda")),
            priority=20,
            re_forms=True,
        )
    )
    registry.add(
        EngineSpec(
            "nccl",
            "unidist_torch.engines.engine:NcclEngine",
            "torch.distributed's NCCL, between GPUs",
            memory_kinds=frozenset(("cuda",)),
            priority=60,
            re_forms=True,
        )
    )


@hookimpl
def unidist_register_frameworks(registry: Registry[FrameworkSpec]) -> None:
    """Register `torch`."""
    registry.add(
        FrameworkSpec(
            "torch",
            "unidist_torch.framework:TorchFramework",
            "torch",
            "PyTorch",
            conformance="unidist_torch.training.conformance",
            exports=(
                (".pt", "unidist_torch.checkpoint.convert:to_torch_file"),
                (".dcp", "unidist_torch.checkpoint.convert:to_distributed_checkpoint"),
            ),
            imports=((".metadata", "unidist_torch.checkpoint.convert:from_distributed_checkpoint"),),
        )
    )
