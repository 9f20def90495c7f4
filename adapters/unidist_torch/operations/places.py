"""Finds the tensor of a named operation: on its device, or in a copy in host memory.

Named operations on a device are queued on its default stream, by whichever thread runs them. So that stream waits for
what the caller's has queued before, and the caller's for it afterwards. Where both are the same, as in most scripts,
there is nothing to do. Never run on a GPU so far.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from unidist.horovod_api.scope import Scope


def place(tensor: torch.Tensor, scope: Scope, *, on_host: bool = False) -> torch.Tensor:
    """Return the values in contiguous memory that an operation of this scope can use: the tensor itself if it is that.

    Args:
        tensor: the script's.
        scope: of the operation.
        on_host: the operation is one of host memory alone.
    """
    tensor = tensor.detach()
    if not tensor.is_cpu and (on_host or not scope.moves(tensor.device.type)):
        tensor = tensor.cpu()
    return tensor.contiguous()


def place_in(
    tensor: torch.Tensor, scope: Scope, *, on_host: bool = False
) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """Return what `place` does and, if it is a copy, a function that copies it back."""
    tensor = tensor.detach()
    placed = place(tensor, scope, on_host=on_host)
    if placed.data_ptr() == tensor.data_ptr() and placed.device == tensor.device:
        return placed, None
    return placed, lambda: tensor.copy_(placed)


def queue_behind_caller(*tensors: torch.Tensor) -> None:
    """Order what named operations do with these tensors behind what this thread has queued. Before submitting them."""
    for tensor in tensors:
        if not tensor.is_cpu:
            shared = torch.cuda.default_stream(tensor.device)
            current = torch.cuda.current_stream(tensor.device)
            if current != shared:
                shared.wait_stream(current)
                tensor.record_stream(shared)  # the allocator gives its memory to nobody while it is used there


def queue_caller_behind(tensor: torch.Tensor) -> None:
    """Order what this thread queues from now on behind a result of a named operation. After waiting for it."""
    if not tensor.is_cpu:
        shared = torch.cuda.default_stream(tensor.device)
        current = torch.cuda.current_stream(tensor.device)
        if current != shared:
            current.wait_stream(shared)
            tensor.record_stream(current)
