"""The plugin of the engine `tcp`. Imports neither the C code nor a framework."""

from __future__ import annotations

from unidist import hookimpl
from unidist.engine import EngineSpec
from unidist.registry import Registry


@hookimpl
def unidist_register_engines(registry: Registry[EngineSpec]) -> None:
    """Register `tcp`."""
    registry.add(
        EngineSpec(
            "tcp",
            "unidist_tcp.engine:TcpEngine",
            "TCP between any hosts, host memory, no framework needed",
            priority=30,
            re_forms=True,
            encrypts=True,
        )
    )
