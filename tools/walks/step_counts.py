"""What a step of data parallelism costs in counts, which no noise of a machine changes, and the most that it may."""

from __future__ import annotations

from dataclasses import asdict, dataclass

__all__ = ["BUCKETS", "GRADIENTS", "GRADIENT_BYTES", "LIMITS", "StepCounts", "more_than", "step_table"]


@dataclass(frozen=True)
class StepCounts:
    """Counts of one step of a rank: a backward pass and a step of the optimizer.

    Args:
        messages: operations on communicators that the rank takes part in.
        message_bytes: that these reduce or send.
        copies: of tensors and buffers, more than the step of PyTorch alone makes.
        allocations: of memory for tensors, more than the step of PyTorch alone makes.
        allocated_bytes: of these.
    """

    messages: int
    message_bytes: int
    copies: int
    allocations: int
    allocated_bytes: int


GRADIENTS, GRADIENT_BYTES, BUCKETS = 16, 4096, 4
"""Of the model of the measured step."""

_ANNOUNCED_BYTES = 4608
"""By which ranks that have no more batches (`join`) hear that there is an update."""
_STATUS_BYTES = 35
"""Which gradients a rank had, and whether they are finite."""

LIMITS = StepCounts(
    messages=BUCKETS + 2,
    message_bytes=GRADIENTS * GRADIENT_BYTES + _ANNOUNCED_BYTES + _STATUS_BYTES,
    copies=GRADIENTS,
    allocations=0,
    allocated_bytes=0,
)
"""Each gradient is copied once, into its bucket, and each bucket is reduced in place, once."""


def step_table(counts: StepCounts) -> list[str]:
    """Return a line for each count."""
    return [f"{name.replace('_', ' '):20} {count:12}" for name, count in asdict(counts).items()]


def more_than(counts: StepCounts, limits: StepCounts) -> list[str]:
    """Return a line for each count that is above its limit."""
    allowed = asdict(limits)
    return [
        f"step: {count} {name.replace('_', ' ')}, but at most {allowed[name]} are allowed (tools/walks/step_counts.py)"
        for name, count in asdict(counts).items()
        if count > allowed[name]
    ]
