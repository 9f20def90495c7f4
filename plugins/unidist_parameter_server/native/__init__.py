"""C code for rules and for the shards of a store in shared memory. Imports nothing.

`rules.c` has the arithmetic, `shards.c` changes shards in shared memory, `module.c` is the interface to Python. The
extension is optional: without a C compiler the package installs, and numpy does the same, bit for bit.
"""

from __future__ import annotations

try:
    from unidist_parameter_server.native import _shards as library

    IS_BUILT = True
except ImportError:
    IS_BUILT = False
    library = None  # type: ignore[assignment]  # whoever uses it looks at IS_BUILT before

__all__ = ["IS_BUILT", "library"]
