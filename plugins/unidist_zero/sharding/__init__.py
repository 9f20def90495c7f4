"""Sharded gradients and parameters without a framework: partition, reduce-scatter, all-gather, shared memory, files.

Imports only the core, and neither `_torch` nor `_keras`. Nothing here but `gathered` is public.
"""

from __future__ import annotations

from unidist_zero.sharding.gathered_model import gathered

__all__ = ["gathered"]
