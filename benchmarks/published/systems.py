"""Systems of papers that divide training in other ways than unidist's strategies, in the planner's terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from typing_extensions import override

from unidist.builtin.data import DataParallel
from unidist.cost_model import (
    EstimatesMemory,
    Exchange,
    PredictsStepTime,
    RankMemory,
    RankStep,
    SearchProblem,
    Workload,
    allreduced,
    divided_sequence,
    sequence_memory,
    sharded,
)
from unidist.cost_model.exchange_cost import BEHIND_BLOCKS
from unidist.mesh import REPLICA_AXES, Divides
from unidist.strategy import Plan, Strategy
from unidist_tensor_parallel import planning as tensor_planning
from unidist_zero.strategy import Zero

MATRICES = 4
"""Of a block of GPT."""


@dataclass(frozen=True)
class DeepSpeed3(Zero):
    """ZeRO-3 as DeepSpeed had it in 2021: matrices are gathered one by one when they are needed, nothing is prefetched.

    With recomputation they are gathered three times (Rajbhandari et al. 2021, arXiv:2104.07857, section 4.1).
    """

    name: ClassVar[str] = "deepspeed"

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        step = sharded(step, stage=3, gathers_per_block=MATRICES, prefetched=False)
        again = Exchange("parameters", "allgather", REPLICA_AXES, "parameters", "backward", MATRICES, by_block=True)
        return step.exchanging(again)


@dataclass(frozen=True)
class SequenceTensor(Strategy, PredictsStepTime):
    """Tensor parallelism with activations cut along the sequence, within a pipeline (Korthikanti et al. 2022).

    Args:
        size: ranks that a layer is cut over.
    """

    name: ClassVar[str] = "sequence-tensor"
    axis: ClassVar[str | None] = "tensor"
    axis_order: ClassVar[int] = 100

    size: int = 8

    @property
    @override
    def axis_size(self) -> int | None:
        return self.size

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        return tensor_planning.predicted(step, self.size, problem, cuts_sequence=True)


@dataclass(frozen=True)
class ContextGather(Strategy, PredictsStepTime, EstimatesMemory):
    """Context parallelism that gathers keys and values.

    Args:
        size: ranks that divide a sequence.
        exchange: see `unidist.cost_model.divided_sequence`.
    """

    name: ClassVar[str] = "context-gather"
    axis: ClassVar[str | None] = "context"
    axis_order: ClassVar[int] = 90
    axis_divides: ClassVar[tuple[Divides, ...]] = ("sequence",)

    size: int = 1
    exchange: Literal["ring", "gather", "ulysses"] = "gather"

    @property
    @override
    def axis_size(self) -> int | None:
        return self.size

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        return divided_sequence(step, "context", self.size, self.exchange)

    @override
    def estimate(self, memory: RankMemory, workload: Workload, plan: Plan) -> RankMemory:
        return sequence_memory(memory, self.size)


@dataclass(frozen=True)
class HorovodData(DataParallel):
    """Data parallelism with Horovod's fusion buffer of 64 MiB."""

    name: ClassVar[str] = "horovod"

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        return allreduced(step, bucket_bytes=64 * 2**20)


@dataclass(frozen=True)
class BytePS(DataParallel):
    """Gradients that each host adds up, and pushes to as many servers as there are hosts, while it fetches others.

    Jiang et al. 2020 (BytePS, OSDI). Both directions of a link are used at the same time, so the fetch takes no longer.
    """

    name: ClassVar[str] = "byteps"

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        per_host = problem.cluster.ranks_per_host
        return step.exchanging(
            Exchange(
                "push",
                "push",
                REPLICA_AXES,
                "gradients",
                "update",
                scale=1 / per_host,
                beside=True,
                tail_bytes=4e6,  # a partition, BYTEPS_PARTITION_BYTES
                servers=problem.world_size // per_host,
            )
        )


@dataclass(frozen=True)
class AsyncTensor(SequenceTensor):
    """The same with exchanges in parts beside the products that need them (torchtitan's async TP)."""

    name: ClassVar[str] = "async-tensor"

    @override
    def predict(self, step: RankStep, plan: Plan, problem: SearchProblem) -> RankStep:
        before = step.exchanges
        step = super().predict(step, plan, problem)
        beside = (replace(item, beside=True, gained=BEHIND_BLOCKS) for item in step.exchanges[len(before) :])
        return replace(step, exchanges=(*before, *beside))


SYSTEMS = (DeepSpeed3, SequenceTensor, AsyncTensor, ContextGather, HorovodData, BytePS)
