"""Communication between ranks for Lightning's strategies, by unidist's operations: shared by Trainer and Fabric."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

import unidist.torch as ud
from unidist.errors import ConfigurationError, UsageError
from unidist.runtime import context
from unidist.strategy import Plan, StrategyLike
from unidist_lightning.environment import UnidistEnvironment

T = TypeVar("T")

_OPERATIONS = {
    "mean": ud.Average,
    "avg": ud.Average,
    "sum": ud.Sum,
    "max": ud.Max,
    "min": ud.Min,
    "product": ud.Product,
}


class Ranks:
    """A mixin in front of Lightning's `ParallelStrategy`, of the Trainer or of Fabric."""

    cluster_environment: Any
    parallel_devices: list[torch.device] | None

    _line: StrategyLike = None

    @property
    def root_device(self) -> torch.device:
        """The device of this rank: one of those that were chosen for this host, in the order of the ranks."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[ud.local_rank() % len(devices)]

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return ud.cross_size() if ud.is_initialized() else self._asked_nodes

    @num_nodes.setter
    def num_nodes(self, asked: int) -> None:
        self._asked_nodes = asked

    _asked_nodes = 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The share of the samples that this rank takes: ranks that hold parts of one model take the same ones."""
        self.plan  # noqa: B018 - it may divide the ranks among model and data
        return {"num_replicas": ud.data_size(), "rank": ud.data_rank()}

    @property
    def plan(self) -> Plan:
        """The checked strategies of this run.

        Raises:
            ConfigurationError: they do not fit the job, or run the passes themselves.
        """
        ud.init()
        plan = context.current().plan_for(self._line)
        if plan.runs_steps is not None:
            name = plan.runs_steps.name
            raise ConfigurationError(
                f"strategy {name!r} runs the forward and backward passes itself, and Lightning has its own loop: "
                f"leave {name!r} out, or train by step = ud.TrainStep(model, optimizer, loss_fn) in a loop of yours"
            )
        return plan

    def join_job(self) -> None:
        """Start unidist, and let Lightning's `rank_zero_only` know the rank. Collective."""
        if self.cluster_environment is None:
            self.cluster_environment = UnidistEnvironment()
        if not isinstance(self.cluster_environment, UnidistEnvironment):
            raise ConfigurationError(
                f"{type(self.cluster_environment).__name__} is not for unidist's ranks, which know their places: leave "
                "plugins= without a ClusterEnvironment"
            )
        ud.init()
        rank_zero_only.rank = ud.rank()

    def check_settings(self) -> None:
        """Raise ConfigurationError if what the script says of devices, hosts and strategies does not fit the job."""
        devices = self.parallel_devices or [torch.device("cpu")]
        # GPUs are all that the host has unless the script says otherwise; there may be fewer ranks.
        is_enough = devices[0].type != "cpu" and len(devices) >= ud.local_size()
        self.cluster_environment.validate_settings(1 if is_enough else len(devices), self._asked_nodes)
        self.plan  # noqa: B018 - refused before anything is prepared

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks."""
        del name, args, kwargs
        if ud.size() > 1:
            ud.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank `src` on every rank."""
        if ud.size() == 1:
            return obj
        found: T = ud.broadcast_object(obj, root_rank=src)
        return found

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all ranks, stacked along a new first dim; differentiable with `sync_grads`."""
        _refuse_group(group)
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return ud.allgather(tensor.unsqueeze(0).contiguous())

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Replace a tensor by its reduction over all ranks, and return it; what is no tensor is returned as it is.

        Args:
            tensor: of the same shape on every rank.
            group: None: all ranks.
            reduce_op: "mean", "sum", "max", "min", "product", or such a `ReduceOp` of torch.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        _refuse_group(group)
        asked = reduce_op if isinstance(reduce_op, str) else str(reduce_op).rpartition(".")[2]
        operation = _OPERATIONS.get(asked.lower())
        if operation is None:
            raise UsageError(f"reduce_op={reduce_op}: unidist reduces by {', '.join(_OPERATIONS)}")
        if ud.size() == 1:
            return tensor
        whole = tensor.detach()
        if operation is ud.Average and not whole.is_floating_point():
            whole = whole.double()
        return tensor.copy_(ud.allreduce(whole, op=operation))


def refuse_bound(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raise UsageError for an optimizer that `distribute` or `DistributedOptimizer` has had already."""
    if hasattr(optimizer, "synchronize"):
        raise UsageError(
            f"{where} is distributed by unidist already. With strategy='unidist' Lightning does that: leave "
            "ud.distribute and ud.DistributedOptimizer out of the script"
        )


def _refuse_group(group: Any) -> None:
    if group is not None and group is not torch.distributed.group.WORLD:
        raise UsageError("groups of torch.distributed are not known to unidist; give none, for all ranks")
