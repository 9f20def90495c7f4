"""Registers the compressor `powersgd`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.gradients import CompressorSpec
from unidist.registry import Registry


@hookimpl
def unidist_register_compressors(registry: Registry[CompressorSpec]) -> None:
    """Register `powersgd`."""
    registry.add(
        CompressorSpec(
            "powersgd",
            "unidist_powersgd.compressor:PowerSGD",
            "gradients travel as low-rank matrices; what is lost is added to the next ones",
        )
    )
