"""unidist: spread a training script over many processes, with any framework, engine and strategy.

This package is the core and imports no framework. Scripts use a facade, `import unidist.torch as ud`;
plugins use the names below and the interface modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist._version import __version__

if TYPE_CHECKING:
    from unidist.jobs.pool.pool import run
    from unidist.runtime.plugin_manager import hookimpl

__all__ = ["__version__", "hookimpl", "run"]

_LAZY = {"run": "unidist.jobs.pool.pool", "hookimpl": "unidist.runtime.plugin_manager"}


def __getattr__(name: str) -> object:
    """Import `run` and `hookimpl` when first used: `import unidist` stays a matter of milliseconds."""
    if name not in _LAZY:
        raise AttributeError(f"module 'unidist' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
