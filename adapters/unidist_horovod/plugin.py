"""The plugin of the Horovod adapter: registers its engine. Imports neither Horovod nor a framework."""

from __future__ import annotations

from unidist import hookimpl
from unidist.engine import EngineSpec
from unidist.registry import Registry


@hookimpl
def unidist_register_engines(registry: Registry[EngineSpec]) -> None:
    """Register `horovod`, which is never taken unasked."""
    registry.add(
        EngineSpec(
            "horovod",
            "unidist_horovod.engine:HorovodEngine",
            "Horovod's ring all-reduce and negotiation; `unidist build horovod` installs it",
            priority=-10,
        )
    )
