"""Lightning's fit in an elastic job: remaining ranks go on with the loop, and newcomers enter it, at a commit.

The loop is entered again in every generation of the job. Model, optimizers, schedulers, callbacks and the loop's
progress are those of the last commit; the samples that the epoch has left are divided over the ranks that there are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

import unidist.torch as ud
from unidist.errors import ConfigurationError
from unidist.mixins import with_mixin

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True)
class FitProgress:
    """The position of training at a commit.

    Args:
        epoch: number of the epoch.
        batches: of this epoch that each rank has trained on.
        samples: of this epoch that all ranks together have trained on.
        commits: number of this commit; 0: the script's beginning.
        batch_size: of each rank; 0: not known yet.
        loops: state of Lightning's loops.
        logged_steps: the step by which Lightning logs.
        schedulers: their states.
        callbacks: their states, by key.
    """

    epoch: int = 0
    batches: int = 0
    samples: int = 0
    commits: int = 0
    batch_size: int = 0
    loops: dict[str, Any] = field(default_factory=dict)
    logged_steps: int = 0
    schedulers: list[dict[str, Any]] = field(default_factory=list)
    callbacks: dict[str, Any] = field(default_factory=dict)


class ElasticTraining:
    """The elastic run of one `fit`.

    Args:
        trainer: whose fit.
        commit_every: number of updates from one commit to the next.
    """

    def __init__(self, trainer: Trainer, commit_every: int) -> None:
        self._trainer: Any = trainer
        self._every = commit_every * trainer.accumulate_grad_batches
        self._state: Any = None
        self._begun = FitProgress()
        self._has_run = False
        self._logged_steps: int | None = None
        self._batch_size = 0
        loop: Any = trainer.fit_loop
        loop.__class__ = with_mixin(type(loop), _ElasticFitLoop)
        loop.elastic = self

    def run(self, fit: Callable[[], None]) -> None:
        """Run the loop in every generation of the job until it has ended. Collective."""
        trainer = self._trainer
        self._begun = self._progress(batches=0, commits=0)
        optimizers = {f"optimizer_{number}": each for number, each in enumerate(trainer.strategy.optimizers)}
        self._state = ud.elastic.TorchState(trainer.lightning_module, progress=self._begun, **optimizers)

        @ud.elastic.run
        def train(state: Any) -> None:
            rank_zero_only.rank = ud.rank()
            self._enter(state.progress)
            fit()

        try:
            train(self._state)
        finally:
            self._state = None

    def batch_starts(self, batches: int) -> None:
        """Commit what was trained before this batch of the epoch, if a commit is due. Collective then."""
        if self._state is None:
            return
        if self._logged_steps is not None:  # the loop counts one too many where it is entered again
            self._trainer.fit_loop.epoch_loop._batches_that_stepped = self._logged_steps
            self._logged_steps = None
        if batches % self._every == 0:
            self._state.progress = self._progress(batches, self._state.progress.commits + 1)
            self._state.commit()

    def divide(self, loader: Any) -> Any:
        """Return the loader of an epoch, with the samples that are left of the present one."""
        sampler = getattr(loader, "sampler", None)
        if not isinstance(loader, DataLoader) or type(sampler) is not DistributedSampler or loader.batch_size is None:
            raise ConfigurationError(
                "an elastic job divides the samples again when ranks join or leave. Give fit one DataLoader over a "
                "dataset of known length, with a batch_size, without a sampler of yours, and leave "
                "use_distributed_sampler=True"
            )
        self._batch_size, begun = loader.batch_size, self._begun
        if begun.batch_size not in (0, self._batch_size):
            raise ConfigurationError(
                f"fit has a loader of batch_size={self._batch_size} on rank {ud.rank()}, and the job trains with "
                f"{begun.batch_size}. A process that joins later runs the script alone until fit, as rank 0 of 1: give "
                "the loader a batch_size that does not depend on the number of ranks"
            )
        rest: Any = sampler
        rest.__class__ = RemainingSampler
        rest.begin(begun.epoch, begun.samples, begun.batches * loader.batch_size)
        rest.set_epoch(self._trainer.fit_loop.epoch_progress.current.processed)  # workers fetch at once
        return loader

    def epoch_ends(self) -> bool:
        """Return whether the loader has to be made again, as it was that of the rest of an epoch."""
        was_rest, self._begun = self._begun.batches > 0, FitProgress()
        return was_rest

    def _enter(self, progress: FitProgress) -> None:
        """Bring the Trainer to where training was; nothing at the script's beginning."""
        if progress.commits == 0 and not self._has_run:
            self._has_run = True
            return
        self._has_run = True
        trainer, loop = self._trainer, self._trainer.fit_loop
        self._begun = progress
        loop.load_state_dict(copy.deepcopy(progress.loops))
        self._logged_steps = progress.logged_steps
        for config, saved in zip(trainer.lr_scheduler_configs, progress.schedulers, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(saved))
        for callback in trainer.callbacks:
            if callback.state_key in progress.callbacks:
                callback.load_state_dict(copy.deepcopy(progress.callbacks[callback.state_key]))
        loop._combined_loader = loop.epoch_loop.val_loop._combined_loader = None  # made again, for these ranks
        trainer.training = True  # a rank may have been lost in the validation
        trainer.lightning_module._current_fx_name = None

    def _progress(self, batches: int, commits: int) -> FitProgress:
        trainer, loop = self._trainer, self._trainer.fit_loop
        epoch = loop.epoch_progress.current.processed
        begun = self._begun if self._begun.epoch == epoch else FitProgress()
        samples = begun.samples + (batches - begun.batches) * self._batch_size * ud.data_size()
        loops = copy.deepcopy(loop.state_dict())
        for counts in loops.get("epoch_loop.batch_progress", {}).values():
            if isinstance(counts, dict):
                counts["ready"] = counts["completed"]  # the batch that has just been fetched is none of these
        return FitProgress(
            epoch,
            batches,
            samples,
            commits,
            self._batch_size,
            loops,
            loop.epoch_loop._batches_that_stepped,
            [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs],
            {each.state_key: copy.deepcopy(each.state_dict()) for each in trainer.callbacks},
        )


class RemainingSampler(DistributedSampler[Any]):
    """Divides what is left of one epoch, and all of the others, over the ranks. `begin` says what is done."""

    def begin(self, epoch: int, done: int, done_here: int) -> None:
        """Leave out the first samples of an epoch.

        Args:
            epoch: number of the epoch.
            done: samples that all ranks have trained on.
            done_here: samples that a rank has counted: the length is that of the epoch, with them.
        """
        self._epoch, self._done, self._done_here = epoch, done, done_here

    @override
    def __iter__(self) -> Iterator[Any]:
        if not self._is_rest:
            return super().__iter__()
        left = self._left()
        return iter((left + left[: -len(left) % self.num_replicas])[self.rank :: self.num_replicas])

    @override
    def __len__(self) -> int:
        if not self._is_rest:
            return super().__len__()
        return self._done_here + -(-len(self._left()) // self.num_replicas)

    @property
    def _is_rest(self) -> bool:
        return self._done > 0 and self.epoch == self._epoch

    def _left(self) -> list[int]:
        dataset: Any = self.dataset
        order = list(range(len(dataset)))
        if self.shuffle:  # as DistributedSampler does
            order = torch.randperm(
                len(dataset), generator=torch.Generator().manual_seed(self.seed + self.epoch)
            ).tolist()
        return order[self._done :]


class _ElasticFitLoop:
    """A mixin in front of Lightning's loop of epochs. Never instantiated by itself."""

    elastic: ElasticTraining

    def run(self) -> None:
        self.elastic.run(super().run)  # type: ignore[misc]  # of the loop

    def on_advance_end(self) -> None:
        super().on_advance_end()  # type: ignore[misc]  # of the loop
        if self.elastic.epoch_ends():
            self._combined_loader = None
