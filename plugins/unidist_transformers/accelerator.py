"""Accelerate's `Accelerator` that distributes by unidist: without `DistributedDataParallel`, with any strategy."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from typing_extensions import override

import unidist.torch as ud
from unidist.errors import UsageError
from unidist.mixins import with_mixin
from unidist.runtime import context
from unidist.strategy import Plan, StrategyLike
from unidist_torch.checkpoint import whole_state
from unidist_transformers.refusals import (
    refuse_bound,
    refuse_job,
    refuse_kind,
    refuse_model,
    refuse_plan,
    refuse_precision,
)
from unidist_transformers.versions import check_version

check_version("accelerate")  # before the imports below fail in other ways

from accelerate import Accelerator  # noqa: E402
from accelerate.data_loader import DataLoaderDispatcher  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.scheduler import AcceleratedScheduler  # noqa: E402
from accelerate.utils.operations import recursively_apply  # noqa: E402

_OPTIMIZER = "_unidist_optimizer"
"""The attribute by which a model knows the optimizer that was distributed with it, without keeping it."""


class DistributesByUnidist:
    """A mixin in front of an `Accelerator`. Never instantiated by itself; see `distribute_by_unidist`."""

    unidist_strategy: StrategyLike = None

    def join_job(self, passes: int = 1) -> None:
        """Start unidist, and check what the script has asked for. Collective.

        Args:
            passes: backward passes of an update, as the script says.
        """
        accelerator: Any = self
        refuse_kind(str(accelerator.distributed_type.value))
        refuse_precision(str(accelerator.mixed_precision))
        ud.init()
        refuse_job(accelerator.state.num_processes)
        refuse_plan(self.plan, passes)

    @property
    def plan(self) -> Plan:
        """The checked strategies of this run."""
        return context.current().plan_for(self.unidist_strategy)

    # The share of the samples that this rank takes: ranks that hold parts of one model take the same ones.

    @property
    def num_processes(self) -> int:
        """Number of ranks with different samples."""
        return ud.data_size()

    @property
    def process_index(self) -> int:
        """Number of this rank among those."""
        return ud.data_rank()

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare model, optimizer, loader and scheduler, as `Accelerator.prepare` does. Collective."""
        models = [each for each in args if isinstance(each, torch.nn.Module)]
        optimizers = [
            each
            for each in args
            if isinstance(each, torch.optim.Optimizer) and not isinstance(each, AcceleratedOptimizer)
        ]
        if optimizers:
            if len(models) != 1 or len(optimizers) != 1:
                raise UsageError(
                    f"prepare() was given {len(models)} models and {len(optimizers)} optimizers: pass one model "
                    "and its optimizer per call"
                )
            self._distribute(models[0], optimizers[0])
        return super().prepare(*args, device_placement=device_placement)  # type: ignore[misc]  # of the Accelerator

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Prepare a model for autocast and compilation; nothing is wrapped around it that exchanges gradients."""
        del evaluation_mode
        refuse_model(model)
        if bound_optimizer(model) is None:
            if any(tensor.is_meta for tensor in model.state_dict().values()):
                raise UsageError("the model is on the meta device: give it to prepare() with its optimizer, and zero=3")
            ud.broadcast_parameters(model.state_dict(), root_rank=0)
        else:
            device_placement = False  # it is there, and parameters may be shards
        return super().prepare_model(  # type: ignore[misc]  # of the Accelerator
            model, device_placement=device_placement, evaluation_mode=True
        )

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler that steps once for each share of the samples, as the loaders divide them."""
        prepared = super().prepare_scheduler(scheduler)  # type: ignore[misc]  # of the Accelerator
        if type(prepared) is AcceleratedScheduler:
            prepared.__class__ = _ScheduleOfShares
        return prepared

    def prepare_data_loader(self, data_loader: Any, *args: Any, **options: Any) -> Any:
        """Prepare a loader that divides the samples over the shares; also one that rank 0 reads for all ranks."""
        return _of_shares(super().prepare_data_loader(data_loader, *args, **options))  # type: ignore[misc]  # as above

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader without the first batches; see `prepare_data_loader`."""
        return _of_shares(super().skip_first_batches(dataloader, num_batches))  # type: ignore[misc]  # as above

    def _distribute(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        refuse_model(model)
        accelerator: Any = self
        if (earlier := bound_optimizer(model)) is not None and earlier is not optimizer:
            earlier.release()
            vars(model).pop("no_sync", None)
        refuse_bound(model, optimizer)
        if accelerator.device_placement and not any(parameter.is_meta for parameter in model.parameters()):
            model.to(accelerator.device)
        ud.distribute(model, optimizer, self.unidist_strategy)
        vars(model)[_OPTIMIZER] = weakref.ref(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of the update by the norm of the whole gradient, wherever its parts are. Collective."""
        return ud.clip_grad_norm_(self._bound(parameters), float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Move each element of the update's gradients into [-clip_value, clip_value]. Collective."""
        ud.clip_grad_value_(self._bound(parameters), clip_value)

    def _bound(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer of parameters."""
        accelerator: Any = self
        wanted = {id(parameter) for parameter in ([parameters] if torch.is_tensor(parameters) else parameters)}
        inner = [each.optimizer for each in accelerator._optimizers]
        for optimizer in inner:
            if any(id(parameter) in wanted for group in optimizer.param_groups for parameter in group["params"]):
                return optimizer
        raise UsageError("clipping: the parameters are not those of an optimizer that prepare() was given")

    def gather(self, tensor: Any) -> Any:
        """Return tensors of all ranks that have different samples, one after the other. Collective."""
        ranks = self._data_ranks

        def gathered(value: torch.Tensor) -> torch.Tensor:
            each = value.detach().clone()[None] if value.ndim == 0 else value.detach().contiguous()
            every = ud.allgather(each)
            if len(ranks) < ud.size():
                parts = every.chunk(ud.size())
                every = torch.cat([parts[rank] for rank in ranks])
            return every

        return recursively_apply(gathered, tensor, error_on_other_type=True) if ud.size() > 1 else tensor

    @property
    def _data_ranks(self) -> list[int]:
        """The first rank of each that has the same samples, in the order of the samples. Collective the first time."""
        found: list[int] | None = vars(self).get("_unidist_data_ranks")
        if found is None:
            every = ud.allgather(torch.tensor([ud.data_rank()])).tolist()
            found = [every.index(number) for number in range(ud.data_size())]
            vars(self)["_unidist_data_ranks"] = found
        return found

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Return the whole weights on rank 0, for `model.save_pretrained(state_dict=...)`; {} elsewhere. Collective."""
        accelerator: Any = self
        return whole_state(accelerator.unwrap_model(model) if unwrap else model) or {}

    def save_state(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: its files hold what rank 0 has."""
        raise UsageError(
            "accelerator.save_state would save this rank's part: use ud.save(path, model, optimizer.optimizer)"
        )

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Refuse, as `save_state`."""
        raise UsageError(
            "accelerator.load_state would load what one rank has saved: use ud.load(path, model, optimizer.optimizer)"
        )


def _of_shares(loader: Any) -> Any:
    """Let a loader that rank 0 reads give the same samples to ranks that hold parts of one model."""
    if (
        isinstance(loader, DataLoaderDispatcher)
        and not isinstance(loader.state, _Shares)
        and ud.data_size() < ud.size()
    ):
        loader.state = _Shares(loader.state)
        loader.slice_fn = _ShareOf(loader.slice_fn)
    return loader


class _Shares:
    """Accelerate's state for a loader that rank 0 reads, where several ranks take the same share of the samples.

    Args:
        state: accelerate's own, which tells the rank that reads and sends.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    @property
    def num_processes(self) -> int:
        """Number of shares."""
        return ud.data_size()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


class _ShareOf:
    """Takes a rank's part of a batch.

    Args:
        slice_fn: see `slice_fn_for_dispatch` of accelerate.
    """

    def __init__(self, slice_fn: Any) -> None:
        self._slice_fn = slice_fn

    def __call__(self, batch: Any, place: slice, process_index: int, num_processes: int) -> Any:
        """Return the samples of the rank's share; accelerate asks for those of process `process_index`."""
        share, size = ud.data_rank(), place.stop - place.start
        if place.start == process_index * size:  # else it asks for the first samples, which complete the last batch
            place = slice(share * size, (share + 1) * size)
        return self._slice_fn(batch, place, process_index=share, num_processes=num_processes)


class _ScheduleOfShares(AcceleratedScheduler):
    """Accelerate's scheduler, which would read the number of processes from accelerate's own state."""

    split_batches: bool

    @override
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step once per share of the samples; accelerate would step once per process."""
        if self.split_batches or not (self.step_with_optimizer and self.gradient_state.sync_gradients):
            super().step(*args, **kwargs)
            return
        self.split_batches = True  # one step for each call
        try:
            for _ in range(ud.data_size()):
                total = getattr(self.scheduler, "total_steps", None)
                if total is None or self.scheduler._step_count <= total:
                    super().step(*args, **kwargs)
        finally:
            self.split_batches = False


class UnidistAccelerator(DistributesByUnidist, Accelerator):
    """Accelerate's `Accelerator`, whose `prepare` distributes by `ud.distribute`.

        accelerator = UnidistAccelerator(strategy="zero=2")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Args:
        strategy: a strategy line, strategy objects, or a list of both; default: the command line's
            (`unidist launch --strategy`), else plain data parallelism.
        options: of `Accelerator`.
    """

    @override
    def __init__(self, *, strategy: StrategyLike = None, **options: Any) -> None:
        super().__init__(**options)
        self.unidist_strategy = strategy
        self.join_job(self.gradient_accumulation_steps)


def distribute_by_unidist(accelerator: Any, strategy: StrategyLike, passes: int) -> None:
    """Let an `Accelerator` distribute by unidist from now on. Collective."""
    accelerator.__class__ = with_mixin(type(accelerator), DistributesByUnidist)
    accelerator.unidist_strategy = strategy
    accelerator.join_job(passes)


def bound_optimizer(model: Any) -> Any:
    """Return the optimizer that a model was distributed with by `prepare`; None if it was not, or is released."""
    reference = vars(model).get(_OPTIMIZER)
    return None if reference is None else reference()
