"""Sharding by ZeRO's three stages (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 3).

With K bytes of optimizer state and master copies for each parameter (12 for Adam in mixed precision), N ranks:
2+2+K without, 2+2+K/N at stage 1, 2+(2+K)/N at stage 2, (2+2+K)/N at stage 3.
"""

from __future__ import annotations

from unidist.cost_model.figures import ModelFigures
from unidist.cost_model.memory import Category, RankMemory, WorkingMemory
from unidist.errors import ConfigurationError

STAGES: dict[int, tuple[Category, ...]] = {
    1: ("optimizer", "master"),
    2: ("optimizer", "master", "gradients"),
    3: ("optimizer", "master", "gradients", "parameters"),
}
"""The categories that each stage shards."""


def sharded(
    memory: RankMemory,
    *,
    stage: int,
    num_ranks: int,
    model: ModelFigures,
    gathered_units: int = 1,
    bucket_elements: int = 0,
    shared_by: int = 1,
) -> RankMemory:
    """Return what a rank holds when a stage of ZeRO shards it.

    Args:
        memory: without ZeRO.
        stage: 1, 2 or 3.
        num_ranks: ranks of a shard group.
        model: tells the size of a gathered unit; if that is unknown, stage 3 is shown without one.
        gathered_units: units that stage 3 holds whole at one time: 1, plus 1 for each that it prefetches.
        bucket_elements: gradients that stages 2 and 3 hold whole at one time.
        shared_by: ranks of one host that map a single copy of the parameters, at any stage; an equal part of it counts
            for each of them, as in `Pss`. Nothing is gathered then.

    Raises:
        ConfigurationError: another stage.
    """
    if stage not in STAGES:
        raise ConfigurationError(f"ZeRO has the stages {', '.join(map(str, STAGES))}, not {stage}")
    divided: list[Category] = [name for name in STAGES[stage] if shared_by == 1 or name != "parameters"]
    memory = memory.split(num_ranks, *divided)
    memory = memory.split(shared_by, "parameters")
    if num_ranks == 1:
        return memory
    if stage == 3 and shared_by == 1 and model.largest_unit is not None:
        memory = memory.add(WorkingMemory("gathered unit", gathered_units * model.largest_unit, "parameters"))
    if stage >= 2 and bucket_elements:
        memory = memory.add(WorkingMemory("gradient bucket", min(bucket_elements, model.num_trained), "gradients"))
    return memory


def offloaded(memory: RankMemory, *, to_host: bool, stage: int) -> RankMemory:
    """Return what a rank holds when its optimizer steps in host memory beside an accelerator, or in mapped files.

    See ZeRO-Offload (Ren et al. 2021, https://arxiv.org/abs/2101.06840). At stages 1 and 2 the host steps on a copy of
    the shard, as wide as the weights if there is no master copy. Stage 3 keeps the shards themselves there. With files
    it does so too, unless the ranks of a host share the parameters; the figures do not count that.

    Args:
        memory: what `sharded` returns.
        to_host: beside an accelerator; False: in files.
        stage: 1, 2 or 3.
    """
    if to_host and stage < 3 and not memory.master.bytes_each:
        memory = memory.widths(master=memory.parameters.bytes_each)
    memory = memory.moved("host" if to_host else "file", "optimizer", "master")
    return memory.moved("host", "parameters") if to_host and stage == 3 else memory
