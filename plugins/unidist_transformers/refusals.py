"""Settings that cannot be combined with unidist: one line each, on every rank."""

from __future__ import annotations

from typing import Any

import torch

import unidist.torch as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.runtime import context
from unidist.strategy import Plan

_ITSELF = "the strategy line of unidist says how to distribute (zero=1, zero=2, zero=3, tensor=N): leave it out"


def refuse_arguments(args: Any) -> None:
    """Raise ConfigurationError for `TrainingArguments` that distribute the model in another way."""
    for name in ("fsdp", "deepspeed", "parallelism_config"):
        if value := getattr(args, name, None):
            raise ConfigurationError(f"TrainingArguments({name}={value!r}): {_ITSELF}")
    if args.save_on_each_node:
        raise ConfigurationError(
            "TrainingArguments(save_on_each_node=True): rank 0 writes a checkpoint, which other hosts read from a file "
            "system that all share; leave it out"
        )


def refuse_model(model: Any) -> None:
    """Raise UsageError for a model that is spread over devices, or distributed, already."""
    devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(devices) > 1:
        raise UsageError(
            f"the model was loaded with a device_map over {', '.join(sorted(devices))}, and with unidist each rank has "
            "one device: load it without device_map, and use the strategy zero=3 or tensor=N if it does not fit"
        )
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise UsageError(f"the model was loaded with a distributed_config: {_ITSELF}")


def refuse_precision(precision: str) -> None:
    """Raise ConfigurationError for float16, whose scaling of the loss does not know ranks that hold shards."""
    if precision == "fp16":
        raise ConfigurationError(
            "fp16: unidist scales the loss itself, where every rank knows of an overflow. Leave fp16 out, and use "
            "bf16=True, or the strategy precision=fp16"
        )


def refuse_kind(kind: str) -> None:
    """Raise ConfigurationError where `accelerate launch` was told to use FSDP, DeepSpeed or Megatron-LM."""
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise ConfigurationError(f"accelerate was configured for {kind}, and {_ITSELF}")


def refuse_job(num_processes: int) -> None:
    """Raise ConfigurationError where accelerate has not found the ranks of the job, or ranks may come and go."""
    if num_processes != ud.size():
        raise ConfigurationError(
            f"accelerate has found {num_processes} process(es), and unidist {ud.size()} (this is rank {ud.rank()}): "
            "start the script by unidist launch, torchrun or accelerate launch, which set RANK and WORLD_SIZE"
        )
    if context.current().is_elastic:
        raise ConfigurationError(
            "an elastic job: the groups of accelerate cannot lose a rank. Leave --min-np out, and start again with "
            "resume_from_checkpoint, on any number of ranks; or use ud.elastic.run with a loop of yours"
        )


def refuse_plan(plan: Plan, passes: int) -> None:
    """Raise ConfigurationError for strategies that the Trainer's loop cannot run.

    Args:
        plan: of the run.
        passes: backward passes of an update, as the script says.
    """
    if plan.runs_steps is not None:
        name = plan.runs_steps.name
        raise ConfigurationError(
            f"strategy {name!r} runs the forward and backward passes itself, and Hugging Face's Trainer and Accelerate "
            f"leave them to the script: leave {name!r} out, or train by step = ud.TrainStep(model, optimizer, loss_fn) "
            "in a loop of yours"
        )
    gate = plan.gate
    if gate is not None and gate.passes_per_update > 1 and passes > 1:
        raise ConfigurationError(
            f"the strategy line accumulates {gate.passes_per_update} batches, and the script {passes} "
            "(gradient_accumulation_steps): say it in one place"
        )


def refuse_bound(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for a model or an optimizer that `ud.distribute` or `DistributedOptimizer` has had already."""
    for name, is_bound in (("model", "no_sync" in vars(model)), ("optimizer", hasattr(optimizer, "synchronize"))):
        if is_bound:
            raise UsageError(
                f"the {name} is distributed by unidist already. UnidistTrainer and UnidistAccelerator do that: leave "
                "ud.distribute and ud.DistributedOptimizer out of the script"
            )
