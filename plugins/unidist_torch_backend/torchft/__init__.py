"""A process group for torchft over the backend `unidist`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_torch_backend.torchft.process_group import ProcessGroupUnidist

__all__ = ["ProcessGroupUnidist"]

__getattr__ = lazy_names(__name__, {"process_group": "ProcessGroupUnidist"})
