"""Runs operations of PyTorch on two ranks: records the calls of the script's thread, and counts what a step costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

from tools.walks.counting import Call, inside, until
from tools.walks.step_counts import BUCKETS, GRADIENT_BYTES, GRADIENTS, StepCounts
from unidist.jobs.pool import RankPool

if TYPE_CHECKING:
    import torch

Calls = list[Call]

WARM_UP = 5
REPEATS = 20
FLOATS = GRADIENT_BYTES // 4
"""Of the tensor that is reduced, and of each gradient."""


_EXCHANGES = (
    *("allgather", "allreduce", "alltoall", "barrier", "broadcast", "exchange_blocks", "recv", "reducescatter", "send"),
)
_COPIES = ("aten::copy_", "aten::cat", "aten::_foreach_copy_")
"""Operations of PyTorch that read one memory and write another; `clone` and `contiguous` call them."""


def record_walks() -> tuple[dict[str, tuple[Calls, int]], StepCounts]:
    """Return the calls of each walk on rank 0 by its name, with the number of operations, and what a step costs.

    The walk of a gradient begins in the hook that autograd calls, and ends where its bucket is posted. That of a step
    begins where the reduced gradients are there.
    """
    with RankPool(2, engine="shm", env={"OMP_NUM_THREADS": "1"}) as pool:
        walks: dict[str, tuple[Calls, int]] = pool.run(_walks)[0]
        counts: StepCounts = pool.run(_step_counts)[0]
    return walks, counts


def _walks() -> dict[str, tuple[Calls, int]]:
    import torch

    import unidist.torch as ud

    ud.init()
    try:
        tensor = torch.ones(FLOATS)
        reduced = [_recorded(lambda: ud.allreduce(tensor, name="walk")) for _ in range(WARM_UP + REPEATS)]
        backwards, steps = [], []
        model, optimizer = _model()
        optimizer = ud.distribute(model, optimizer, strategy=_STRATEGY)[1]
        for _ in range(WARM_UP + REPEATS):
            optimizer.zero_grad()
            loss = torch.stack([layer(tensor) for layer in model]).sum()
            backwards.append(_recorded(loss.backward))
            steps.append(_recorded(optimizer.step))
        return {
            "all-reduce by name": (_shortest(reduced), 1),
            "gradient": (until(inside(_shortest(backwards), "hook"), "_post"), GRADIENTS),
            "step": (_shortest(steps), 1),
        }
    finally:
        ud.shutdown()


_STRATEGY = f"data:bucket_mb={4 * FLOATS * GRADIENTS / BUCKETS / 2**20}"


def _model() -> tuple[torch.nn.ModuleList, torch.optim.Optimizer]:
    import torch

    model = torch.nn.ModuleList(torch.nn.Linear(FLOATS, 1, bias=False) for _ in range(GRADIENTS))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _step_counts() -> StepCounts:
    import torch

    import unidist.torch as ud
    from unidist.algorithms import _kernels
    from unidist.runtime.context import current

    ud.init()
    try:
        inputs = torch.ones(FLOATS)

        def warm_step(model: Any, optimizer: Any) -> Callable[[], None]:
            def step() -> None:
                optimizer.zero_grad()
                loss: Any = torch.stack([layer(inputs) for layer in model]).sum()
                loss.backward()
                optimizer.step()

            for _ in range(WARM_UP):
                step()
            return step

        alone, ours = warm_step(*_model()), warm_step(*ud.distribute(*_model(), strategy=_STRATEGY))
        steps: list[list[int]] = []
        for _ in range(3):  # the fewest: a rank that is late makes others ask again
            steps.append([])
            with _exchanges_noted(type(current().world), steps[-1]):
                ours()
        exchanged = min(steps, key=len)
        own_copies = _c_calls(ours, _kernels.copy)
        copies, allocations, allocated = (
            with_it - without for with_it, without in zip(_in_torch(ours), _in_torch(alone), strict=True)
        )
        return StepCounts(len(exchanged), sum(exchanged), copies + own_copies, allocations, allocated)
    finally:
        ud.shutdown()


@contextmanager
def _exchanges_noted(kind: type[Any], exchanged: list[int]) -> Iterator[None]:
    """Append the bytes of the first buffer of each operation on communicators of a class."""

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(self: Any, *args: Any, **options: Any) -> Any:
            exchanged.append(args[0].nbytes if args else 0)
            return real(self, *args, **options)

        return operation

    with ExitStack() as stack:
        for name in _EXCHANGES:
            stack.enter_context(mock.patch.object(kind, name, noting(getattr(kind, name))))
        yield


def _c_calls(operation: Callable[[], None], function: object) -> int:
    """Return how often the thread of the script calls a function that is written in C."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "c_call" and argument == function

    sys.setprofile(note)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return count


def _in_torch(step: Callable[[], None]) -> tuple[int, int, int]:
    """Return how many copies and allocations PyTorch makes in a step, and of how many bytes."""
    from torch.autograd.profiler import profile

    recorded: Any = profile(profile_memory=True)
    with recorded:
        step()
    events = list(recorded.function_events)
    allocated = [event.cpu_memory_usage for event in events if event.cpu_memory_usage > 0]
    return sum(event.name in _COPIES for event in events), len(allocated), sum(allocated)


def _shortest(found: list[Calls]) -> Calls:
    """Return the one without waits for the other rank, which look at the clock now and then."""
    return min(found[WARM_UP:], key=len)


def _recorded(operation: Callable[[], Any]) -> Calls:
    """Return file and name of each function that is called on this thread until the operation has returned."""
    calls: Calls = []
    depth = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal depth
        if event == "call":
            depth += 1
            calls.append(Call(frame.f_code.co_filename, frame.f_code.co_name, depth))
        elif event == "return":
            depth -= 1

    sys.setprofile(note)
    try:
        operation()
    finally:
        sys.setprofile(None)
    return calls
