"""Tells torch.distributed about the backend. PyTorch calls it at the end of `import torch`, so it imports nothing else.

With `TORCH_DEVICE_BACKEND_AUTOLOAD=0` PyTorch does not; scripts then call `unidist_torch_backend.register()`.
"""

from __future__ import annotations

from typing import Any

NAME = "unidist"


def register() -> None:
    """Register the backend for CPU tensors. Does nothing the second time, or where torch has no `distributed`."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make_group, extended_api=True, devices=["cpu"])


def _make_group(options: Any, backend_options: object) -> Any:
    """Make a process group; PyTorch calls it on every member of one."""
    from unidist_torch_backend.process_group import make_group

    return make_group(options, backend_options)
