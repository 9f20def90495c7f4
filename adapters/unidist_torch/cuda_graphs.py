"""CUDA graphs: what cannot be part of one says so, instead of failing inside of CUDA, or being left out of replays."""

from __future__ import annotations

import torch

from unidist.errors import UsageError
from unidist.runtime import context

__all__ = ["refuse_capture"]


def refuse_capture(what: str, tensor: torch.Tensor) -> None:
    """Raise UsageError if the current stream records a CUDA graph.

    For what the host does with other ranks in every step: a replay would leave it out.

    Args:
        what: is being captured.
        tensor: that it works on; for one of another device nothing is asked.

    Raises:
        UsageError: says what can be captured.
    """
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            f"{what} on rank {context.current().topology.rank} is being captured in a CUDA graph, and cannot be: in "
            "each step the ranks agree in host memory, which a replay would leave out. Capture the model's own "
            'passes, for example with torch.compile(model, mode="reduce-overhead"), and leave this outside of '
            "torch.cuda.graph"
        )
