"""The two ways to make training distributed: `distribute(model, optimizer)` and Horovod's `DistributedOptimizer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from unidist import context
from unidist.errors import UsageError
from unidist.strategy import Plan
from unidist.strategy_spec import StrategyLike
from unidist.update import Accumulation, Update
from unidist_torch.framework import TorchFramework
from unidist_torch.functions import broadcast_optimizer_state, broadcast_parameters
from unidist_torch.operations import Average, Op, Sum


def distribute(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, strategy: StrategyLike = None
) -> tuple[torch.nn.Module, Any]:
    """Spread training over all ranks; the script keeps its loop, its model and its optimizer.

    Copies rank 0's parameters, buffers and optimizer state to all ranks, and binds the optimizer: gradients are
    exchanged while `backward` runs, and when it returns every `p.grad` holds the average over the ranks, ready to be
    clipped. Collective, and so is every backward pass that completes an update. Broadcasts nothing later.

    Args:
        model: built alike on every rank.
        optimizer: over the model's parameters.
        strategy: a strategy line ("accumulate=4"), strategy objects, or a list of both; default: the command
            line's (`unidist launch --strategy`), else plain data parallelism.

    Returns:
        The model and the optimizer to use from now on: the same objects, or what the strategies made of them.

    Raises:
        ConfigurationError: the strategies do not fit the world or each other; the ranks' models differ.
        NotInitializedError: `init()` was not called.
    """
    runtime = context.current()
    plan = runtime.plan_for(strategy)
    for item in plan.strategies:
        model = item.partition(model, runtime)
    names = TorchFramework().parameters(model)
    _check_owned(optimizer, names)
    _bind(runtime, plan, optimizer, dict(names), in_backward=True)
    broadcast_parameters(TorchFramework().model_state(model), root_rank=0)
    if runtime.topology.world_size > 1:
        broadcast_optimizer_state(optimizer, root_rank=0)
    return model, optimizer


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    *,
    backward_passes_per_step: int = 1,
    op: Op = Average,
) -> Any:
    """Return the optimizer, bound so that its `step` uses gradients reduced over all ranks. Collective.

    As in Horovod, gradients are complete after `optimizer.synchronize()`, which `step` calls where the script does
    not. Unlike `distribute` it copies nothing to other ranks: call `broadcast_parameters` and
    `broadcast_optimizer_state`, as Horovod's scripts do.

    Args:
        optimizer: any torch optimizer; the same object is returned, of a subclass of its class.
        named_parameters: names for messages; as `model.named_parameters()`.
        backward_passes_per_step: call `step` once after this many backward passes; their gradients are summed.
            (`--strategy accumulate=N` is for scripts that call `step` after every pass.)
        op: Average or Sum.
    """
    if op not in (Average, Sum):
        raise UsageError(f"DistributedOptimizer computes Average or Sum, not {Op(op).name}")
    runtime = context.current()
    accumulation = None
    if backward_passes_per_step != 1:
        if context.update_gate(runtime.plan) is not None:
            raise UsageError(
                f"backward_passes_per_step={backward_passes_per_step} and the command line's accumulate strategy both "
                "accumulate; use one of them"
            )
        accumulation = Accumulation(passes=backward_passes_per_step, average=False, stepwise=False)
    names = dict(named_parameters) if named_parameters is not None else None
    return _bind(runtime, runtime.plan, optimizer, names, accumulation=accumulation, average=op is Average)


def _bind(
    runtime: context.Context,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    names: dict[str, torch.Tensor] | None,
    *,
    accumulation: Accumulation | None = None,
    average: bool = True,
    in_backward: bool = False,
) -> Any:
    gate = context.update_gate(plan)
    if accumulation is None:
        accumulation = (
            Accumulation(gate.passes_per_update, gate.averages_passes) if gate is not None else Accumulation()
        )
    framework = TorchFramework()
    owner = context.gradient_owner(plan)
    update = Update(
        runtime,
        lambda parameters: owner.make_exchange(parameters, runtime, framework),
        accumulation=accumulation,
        average=average,
        strategies=plan.strategies,
        in_backward=in_backward and owner.completes_in_backward,
    )
    return framework.bind_update(optimizer, update, names=names)


def _check_owned(optimizer: torch.optim.Optimizer, names: Any) -> None:
    owned = {id(tensor) for tensor in names.values()}
    strays = sum(id(parameter) not in owned for group in optimizer.param_groups for parameter in group["params"])
    if strays:
        raise UsageError(
            f"the optimizer has {strays} parameters that are not the model's. Create the optimizer after the model "
            "is final, from model.parameters(); for parameters of several models use DistributedOptimizer."
        )
