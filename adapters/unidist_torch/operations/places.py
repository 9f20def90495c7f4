"""Finds the tensor of a named operation, and orders the operation between what its caller queues.

On a device, named operations run on a stream of their own, by whichever thread drives them. That stream waits for what
the caller's has queued when the operation is submitted, and the caller's for the operation when the caller has waited
for it. Never run on a GPU so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from unidist.horovod_api.scope import Scope
from unidist.negotiation import DeviceOrder
from unidist_torch.cuda_graphs import refuse_capture


def place(tensor: torch.Tensor, scope: Scope) -> torch.Tensor:
    """Return the values in contiguous memory that an operation of this scope can use: the tensor itself if it is that.

    Args:
        tensor: the script's.
        scope: of the operation.
    """
    refuse_capture("an operation by name (ud.allreduce, say)", tensor)
    tensor = tensor.detach()
    if not tensor.is_cpu and not scope.moves(tensor.device.type):
        tensor = tensor.cpu()
    return tensor.contiguous()


def place_in(tensor: torch.Tensor, scope: Scope) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """Return what `place` does and, if it is a copy, a function that copies it back."""
    tensor = tensor.detach()
    placed = place(tensor, scope)
    if placed.data_ptr() == tensor.data_ptr() and placed.device == tensor.device:
        return placed, None
    return placed, lambda: tensor.copy_(placed)


class StreamOrder(DeviceOrder):
    """The order of one operation among what its caller queues. Made when the operation is submitted.

    Args:
        tensors: that the operation uses, on one device.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = list(tensors)
        self._device = tensors[0].device
        self._submitted = torch.cuda.current_stream(self._device).record_event()
        self._ended: Any = None

    def made(self, tensor: torch.Tensor) -> None:
        """Take note of an output that the operation has allocated."""
        self._tensors.append(tensor)

    @override
    def begin(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._submitted)
        self._keep_for(stream)

    @override
    def end(self) -> None:
        self._ended = torch.cuda.current_stream(self._device).record_event()

    def follow(self) -> None:
        """Let what this thread queues from now on come behind the operation, which it has waited for."""
        assert self._ended is not None, "the operation has ended"
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._ended)
        self._keep_for(stream)

    def _keep_for(self, stream: torch.cuda.Stream) -> None:
        """Let the allocator give the memory of the tensors to nobody while a stream uses it."""
        for tensor in self._tensors:
            tensor.record_stream(stream)


def stream_order(*tensors: torch.Tensor) -> StreamOrder | None:
    """Return the order of an operation on these tensors; None: they are in host memory."""
    return None if tensors[0].is_cpu else StreamOrder(*tensors)
