"""Copies of large blocks of host memory."""

from __future__ import annotations

from collections.abc import Callable

copy_memory: Callable[[int, int, int], None] | None
"""`copy_memory(target, source, nbytes)`: copy between addresses past the caches.

For large blocks that this core does not read again soon. None where the package was built without a C compiler.
"""

try:
    from unidist.algorithms._kernels import copy as copy_memory
except ImportError:
    copy_memory = None
