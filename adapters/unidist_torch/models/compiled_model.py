"""Models that `torch.compile` has wrapped: their original paths, and our code, which it shall not compile."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from unidist.errors import UsageError

_WRAPPED = "_orig_mod"
"""The name under which a wrapper has its module."""


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module that `torch.compile` has wrapped; other modules unchanged."""
    while (inner := getattr(model, "_modules", {}).get(_WRAPPED)) is not None:
        model = inner
    return model


def uncompiled_path(path: str) -> str:
    """Return a path in a model without the wrappers of `torch.compile`."""
    return ".".join(part for part in path.split(".") if part != _WRAPPED)


def forget_compiled() -> None:
    """Have `torch.compile` compile everything again: it does not notice hooks that a module gets or loses."""
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@functools.cache
def leave_uncompiled(*packages: str) -> None:
    """Let `torch.compile` neither trace nor compile the code of these packages; what it calls elsewhere is compiled.

    For hooks and layers that exchange: tracing them takes seconds or minutes, and finds nothing to compile.
    """
    with suppress(ImportError, AttributeError):  # of a torch in which this is elsewhere: tracing then takes its time
        from torch._dynamo import trace_rules

        for package in packages:
            trace_rules.add(package)


def bucketed_backend(backend: str | Callable[..., Any] = "inductor", *, bucket_mb: float = 25.0) -> Callable[..., Any]:
    """Return a backend of `torch.compile` whose gradients are ready bucket by bucket, so that exchanges overlap.

        model = torch.compile(model, backend=ud.bucketed_backend())

    A graph that is compiled as a whole gives all gradients at its end, so nothing is exchanged while it computes. Here
    graphs are cut as torch cuts those of `DistributedDataParallel`, by the parameters that they use.

    Args:
        backend: compiles the parts: a name (`torch.compiler.list_backends()`), or a function.
        bucket_mb: MB of parameters in each part; smaller parts begin to be exchanged sooner.

    Raises:
        UsageError: `bucket_mb` is not above 0.
    """
    if not 0 < bucket_mb < math.inf:
        raise UsageError(f"bucketed_backend(bucket_mb={bucket_mb}): give the MB of parameters in a bucket, above 0")

    def compiled(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._dynamo.backends.distributed import DDPOptimizer
        from torch._dynamo.backends.registry import lookup_backend

        nbytes = int(bucket_mb * 2**20)
        cut = DDPOptimizer(nbytes, lookup_backend(backend), first_bucket_cap=min(nbytes, 1 << 20))
        return cut.compile_fn(graph, inputs)

    return compiled
