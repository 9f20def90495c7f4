"""Code shared by adapters whose tensors reach the host as numpy arrays: memory, operations, samples, gradients.

Knows no framework. `memory` is below the other modules; `arithmetic` is below `host_framework`, and `slices` below
`fused_exchange`. Adapters and plugins may import the modules listed here.
"""

__all__ = [
    "arithmetic", "fused_exchange", "host_framework", "memory", "numbered_samples", "operations", "slices",
    "token_batches", "trained_arrays",
]  # fmt: skip
