"""Checks of a layer's arguments, the same for all frameworks."""

from __future__ import annotations


def check_arguments(num_experts: int, top_k: int, kind: str, softmax: str, capacity_factor: float | None) -> None:
    """Raise ValueError if an argument of a layer means nothing; lists the choices."""
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k}: give 1 to {num_experts}, the number of experts")
    if kind not in ("swiglu", "gelu", "relu"):
        raise ValueError(f"kind={kind!r}; choices: swiglu, gelu, relu")
    if softmax not in ("before", "after"):
        raise ValueError(f"softmax={softmax!r}; choices: before, after")
    if capacity_factor is not None and not capacity_factor > 0:
        raise ValueError(f"capacity_factor={capacity_factor}: give a factor above 0, or None to drop no token")
