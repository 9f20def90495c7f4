"""Programs for several devices of this process: each device calls the host, and one of these calls does the work.

XLA's partitioner divides arrays over the devices. Operands of a call are whole on each of them, reduced over the
devices first where a program computes a sum over divided rows. A device must not wait in a collective of XLA while
another one waits for other ranks, or has failed: XLA ends the process then, after 40 seconds. So all devices call, and
their calls meet here.

Relies on what lowering rules may use: the context of `jax.interpreters.mlir`, and the dialect `sdy` of
`jax.extend.mlir`, in 0.10 and later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir

from unidist.errors import StalledError, UsageError
from unidist.runtime import context
from unidist.settings import Settings

_AXIS = "devices"


def device_count(ctx: Any, title: str) -> int:
    """Return for how many devices of this process a program is that is being lowered.

    Raises:
        UsageError: an operation cannot be in it: within `shard_map` or `pmap`, or with devices of other processes.
    """
    axes = ctx.module_context.axis_context
    if isinstance(axes, mlir.ShardingContext):
        if axes.num_devices > 1:
            _check_devices(axes, title)
        return axes.num_devices
    count = getattr(getattr(axes, "mesh", None), "size", 1)
    if count > 1:
        raise UsageError(
            f"{title} is within shard_map or pmap over {count} devices of this process, where each device has other "
            "values; unidist's operations take those of the whole process. Reduce over the axes of the mesh there "
            "(jax.lax.psum, pmean), return the result, and call the operation outside of shard_map"
        )
    return 1


def _check_devices(axes: mlir.ShardingContext, title: str) -> None:
    owners = sorted({device.process_index for device in axes.device_assignment or ()})
    if len(owners) > 1:
        raise UsageError(
            f"{title} is in a program for devices of the processes {owners} of jax.distributed; unidist's operations "
            "run in programs for the devices of one process. Use arrays on jax.local_devices(), or call the operation "
            "outside of the program"
        )
    if not jax.config.jax_use_shardy_partitioner:
        raise UsageError(
            f"{title} is in a program for {axes.num_devices} devices of this process, which needs the partitioner "
            "Shardy: leave jax_use_shardy_partitioner on"
        )


def on_every_device(
    ctx: Any, count: int, operands: Sequence[ir.Value], lower: Callable[..., Sequence[ir.Value]]
) -> list[ir.Value]:
    """Lower a part of a program that each device runs by itself, on whole arrays.

    Args:
        ctx: of the lowering, with the types of the operands and the results.
        count: number of devices.
        operands: values of the program.
        lower: `lower(*operands)` adds the operations and returns their results.
    """
    results = [mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out]
    part = sdy.ManualComputationOp(
        results,
        list(operands),
        _whole(ctx.avals_in, count),
        _whole(ctx.avals_out, count),
        sdy.ManualAxesAttr.get([ir.StringAttr.get(_AXIS)]),
    )
    block = ir.Block.create_at_start(part.body, [operand.type for operand in operands])
    with ir.InsertionPoint(block):
        sdy.ReturnOp(list(lower(*block.arguments)))
    return list(part.results)


def _whole(avals: Sequence[Any], count: int) -> sdy.TensorShardingPerValueAttr:
    mesh = sdy.MeshAttr.get([sdy.MeshAxisAttr.get(_AXIS, count)])
    closed = sdy.DimensionShardingAttr.get([], is_closed=True)
    dims = [len(getattr(aval, "shape", ())) for aval in avals]
    return sdy.TensorShardingPerValueAttr.get([sdy.TensorShardingAttr.get(mesh, [closed] * each) for each in dims])


class DeviceRendezvous:
    """Meeting point for the calls of one program's devices: the last one to arrive does the work for all.

    Args:
        count: number of devices.
        title: of the operation, for errors.
        work: does it, given the addresses of all calls; returns the text of an error.
        limit: how long a device waits for others; default: as an operation waits for other ranks.
    """

    def __init__(
        self,
        count: int,
        title: str,
        work: Callable[[Sequence[tuple[int, ...]]], str | None],
        *,
        limit: timedelta | None = None,
    ) -> None:
        self._count, self._title, self._work, self._limit = count, title, work, limit
        self._changed = threading.Condition()
        self._round = _Round()

    def run(self, addresses: tuple[int, ...]) -> str | None:
        """Return when the work is done; returns the text of an error, the same on all devices.

        Raises:
            StalledError: other devices have not come in time.
        """
        with self._changed:
            own = self._round
            own.calls.append(addresses)
            if len(own.calls) < self._count:
                self._wait_for_others(own)
                return own.error
            self._round = _Round()
        try:
            own.error = self._work(own.calls)
        finally:
            with self._changed:
                own.is_done = True
                self._changed.notify_all()
        return own.error

    def _wait_for_others(self, own: _Round) -> None:
        default = context.current().settings if context.is_initialized() else Settings()
        limit = (self._limit or default.timeout).total_seconds()
        end = time.monotonic() + limit
        while not own.is_done:
            came = len(own.calls)
            if came == self._count:
                self._changed.wait()  # for the work, which has a limit itself
            elif not self._changed.wait(max(0.0, end - time.monotonic())) and len(own.calls) < self._count:
                own.calls.clear()
                raise StalledError(
                    f"{self._title}: {came} of the {self._count} devices of this process that run its program have "
                    f"reached it, and the others have not within {limit:g} s"
                )


class _Round:
    """One call of the program by each device."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.is_done = False
        self.error: str | None = None
