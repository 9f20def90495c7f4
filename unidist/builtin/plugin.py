"""The core's own plugin: what unidist registers of itself, through the same entry point as everybody else."""

from __future__ import annotations

from unidist.engine import EngineSpec
from unidist.gradients import CompressorSpec
from unidist.registry import Registry
from unidist.runtime.plugin_manager import hookimpl
from unidist.strategy import StrategySpec


@hookimpl
def unidist_register_engines(registry: Registry[EngineSpec]) -> None:
    """Register `single` and `shm`."""
    registry.add(
        EngineSpec(
            "single",
            "unidist.engines.single:SingleEngine",
            "one process, nothing to move",
            priority=100,
            re_forms=True,
        )
    )
    registry.add(
        EngineSpec(
            "shm",
            "unidist.engines.shm:ShmEngine",
            "shared memory, all ranks on one host",
            priority=50,
            re_forms=True,
        )
    )


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register `data` and `identity`."""
    registry.add(
        StrategySpec("data", "unidist.builtin.data:DataParallel", "average gradients by all-reduce (the default)")
    )
    registry.add(StrategySpec("identity", "unidist.builtin.identity:Identity", "does nothing: a model for plugins"))


@hookimpl
def unidist_register_compressors(registry: Registry[CompressorSpec]) -> None:
    """Register `none`, `fp16` and `bf16`."""
    registry.add(CompressorSpec("none", "unidist.builtin.uncompressed:NoCompression", "gradients travel as they are"))
    registry.add(CompressorSpec("fp16", "unidist.builtin.half:Float16", "gradients travel as float16"))
    registry.add(CompressorSpec("bf16", "unidist.builtin.half:BFloat16", "gradients travel as bfloat16"))
