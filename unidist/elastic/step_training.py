"""Elastic training without changes to the script's loop: each step is a transaction.

A step that loses a peer does not count: everything is restored to the last commit. The data follows the progress of
training, so the loop gets the same samples again, divided over the present ranks, and need not know about it.
Framework-free; the adapters' training steps use it.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from unidist.elastic.batches import BatchShare, Position, SampleOrder
from unidist.elastic.generations import Generations, leaving_on_signals
from unidist.elastic.state import HostsUpdatedInterrupt, ObjectState
from unidist.errors import ConfigurationError, PeerLostError, UsageError
from unidist.mesh import DATA_AXIS, SAMPLE_AXES
from unidist.optim.interface import OutlivesGenerations
from unidist.runtime import context

if TYPE_CHECKING:
    from unidist.control.elastic.member import Member
    from unidist.runtime.context import Context
    from unidist.strategy.interface import Plan

GlobalBatch = Literal["keep", "rescale"]


@dataclass(frozen=True)
class Policy:
    """The user's choices for elastic training steps; `TrainStep(..., elastic=True)` uses the defaults.

    In a job whose ranks do not change, samples are distributed and hooks are called in the same way.

    Args:
        global_batch: "keep": a step uses as many samples as at the beginning, `batch_size` times the ranks (and
            times N with `accumulate=N`), in micro-batches of at most `batch_size`; "rescale": each rank uses
            `batch_size` samples, so the samples of a step change with the number of ranks: adapt the learning rate in
            `on_resize`.
        commit_every: steps from one commit to the next. When a rank is lost, the steps since the last commit are
            repeated. Ranks join and leave only at commits.
        state: other objects that belong to training, besides model, optimizer and data, by any name; they have
            `state_dict` and `load_state_dict` (a scheduler).
        after_step: called at the end of every step, as a part of it: its effect on `state` counts exactly once.
        after_epoch: called with the number of the epoch at the end of its last step, as a part of it.
        on_resize: called on every rank with the old and the new number of ranks, when it has changed; if the model is
            divided, of replicas.

    Raises:
        UsageError: an unknown `global_batch`, or `commit_every` is less than 1.
    """

    global_batch: GlobalBatch = "keep"
    commit_every: int = 1
    state: Mapping[str, Any] = field(default_factory=dict)
    after_step: Callable[[], object] | None = None
    after_epoch: Callable[[int], object] | None = None
    on_resize: Callable[[int, int], object] | None = None

    def __post_init__(self) -> None:
        if self.global_batch not in get_args(GlobalBatch):
            raise UsageError(f"global_batch={self.global_batch!r}; choices: {', '.join(get_args(GlobalBatch))}")
        if self.commit_every < 1:
            raise UsageError(f"commit_every={self.commit_every}: give at least 1")
        for name, value in self.state.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise UsageError(
                    f"state[{name!r}] is a {type(value).__name__} without state_dict() and load_state_dict(), by which "
                    "elastic training keeps it"
                )


@dataclass(frozen=True)
class Progress:
    """The progress of training: a part of the state, equal on all ranks.

    Args:
        order: of the samples.
        batch_size: samples of a rank's micro-batch.
        global_batch: samples of a step.
        num_ranks: ranks that divide them; of a divided model, replicas.
        position: of the next step.
        steps: number of completed steps.
        loss: of the last one; NaN before the first.
    """

    order: SampleOrder
    batch_size: int
    global_batch: int
    num_ranks: int
    position: Position = field(default_factory=Position)
    steps: int = 0
    loss: float = math.nan


class Redistributable(ABC):
    """Data that can be redistributed over the ranks in the middle of an epoch.

    With each batch that it yields, it sets the context's `elastic_data` to itself.

    Attributes:
        order: of its samples.
        batch_size: of one rank.
        start: the position at which training on it begins.
    """

    order: SampleOrder
    batch_size: int | None
    start: Position = Position()

    @abstractmethod
    def follow(self, progress: Callable[[], Progress]) -> None:
        """From now on yield the batches that `progress` calls for, asking it again for each batch."""

    @abstractmethod
    def take_share(self) -> BatchShare | None:
        """Return this rank's share that the last batch holds, once; None if it was taken before.

        Raises:
            UsageError: there was no batch.
        """


class StepTraining:
    """Runs the steps of a script's own loop through the generations of an elastic job, the same on every rank.

    Args:
        membership: of this process; None in a job whose ranks do not change, where no state is kept.
        data: the data of the loop.
        policy: the user's choices.
        make_state: makes a state of the model, the optimizer and so on, with the given attribute `progress`.
            Collective if each rank keeps a share.
        passes: number of passes over a rank's batch in a step, see `passes_of_step`.
    """

    def __init__(
        self,
        membership: Member | None,
        data: Redistributable,
        policy: Policy,
        make_state: Callable[[Progress], ObjectState],
        *,
        passes: int = 1,
    ) -> None:
        assert data.batch_size is not None, "redistributable data has batches"
        _, size = sample_place(context.current())
        self._data, self._policy = data, policy
        self._order = data.order
        self._passes = passes
        self._generations: Generations | None = None
        global_batch = data.batch_size * passes * size
        start = data.start
        if start.processed >= data.order.length(global_batch):
            start = Position(start.epoch + 1)
        progress = Progress(data.order, data.batch_size, global_batch, size, start)
        if membership is None:
            self._state: Any = ObjectState(progress=progress)
        else:
            self._state = make_state(progress)
            self._generations = Generations(membership, self._state, is_function=False)
            self._leaving = contextlib.ExitStack()  # never closed: the script may continue after training
            self._leaving.enter_context(leaving_on_signals(membership))
            self._generations.begin()
            self._adapt(self._generations)
        data.follow(lambda: self.progress)

    @property
    def progress(self) -> Progress:
        """The progress of training."""
        found: Progress = self._state.progress
        return found

    def step(self, train: Callable[[BatchShare], float]) -> float:
        """Train on the latest batch of the data, or drop that batch if the world has changed.

        Args:
            train: trains on this rank's share; returns the mean loss over the samples of all ranks.

        Returns:
            The loss of the last step that counts, equal on every rank.

        Raises:
            UsageError: the latest batch was trained on before.
            SystemExit, StalledError, StateLostError: see `Generations.enter_next_generation`.
            PeerLostError: in a job whose ranks do not change.
        """
        share = self._data.take_share()
        if share is None:
            raise UsageError(
                "step() was called twice with one batch, or with a batch of data that was sharded later: in an elastic "
                "job call ud.shard once, before the loop over epochs, and give each of its batches to step() once. Use "
                "elastic=False and ud.elastic.run for another kind of loop"
            )
        if not self._is_next(share):
            return self.progress.loss
        if self._generations is None:
            self._take_step(share, train)
            return self.progress.loss
        reason = None
        try:
            self._take_step(share, train)
        except (HostsUpdatedInterrupt, PeerLostError) as exc:
            reason = self.reason_of(exc)
        if reason is not None:  # outside of the handler: the exception's frames refer to the old generation
            self.enter_next_generation(reason)
        return self.progress.loss

    def _is_next(self, share: BatchShare) -> bool:
        """Return whether the share belongs to the next step.

        It does not if this rank has just joined and the others are further along, or if the first batch was made
        before it was known that a step uses several.
        """
        (rank, size), now = sample_place(context.current()), self.progress
        left = now.order.length(now.global_batch) - now.position.processed
        is_whole = share.total >= min(now.global_batch, left)
        return is_whole and (share.position, share.rank, share.size) == (now.position, rank, size)

    def reason_of(self, exc: HostsUpdatedInterrupt | PeerLostError) -> str:
        """Return what was lost, for `enter_next_generation`; re-raise the error in a job whose ranks do not change."""
        if self._generations is None:
            raise exc
        return self._generations.reason_of(exc)

    def enter_next_generation(self, reason: str) -> None:
        """Enter the next generation with the state of the last commit, after a loss outside of `step`.

        Args:
            reason: see `Generations.enter_next_generation`, which also lists the errors.
        """
        assert self._generations is not None, "reason_of has raised"
        self._generations.enter_next_generation(reason)
        self._adapt(self._generations)

    def skip_to(self, epoch: int) -> None:
        """Continue at the beginning of an epoch. Every rank calls it with the same epoch; the next step commits it."""
        self._state.progress = replace(self.progress, position=Position(epoch))

    def finish(self) -> None:
        """End training, for now: make a checkpoint if the state is durable. Collective."""
        self._state.finish()

    def _take_step(self, share: BatchShare, train: Callable[[BatchShare], float]) -> None:
        policy, before = self._policy, self.progress
        loss = train(share)
        self._state.progress = replace(before, position=share.following, steps=before.steps + 1, loss=loss)
        if policy.after_step is not None:
            policy.after_step()
        ends_epoch = share.following.epoch > share.position.epoch
        if ends_epoch and policy.after_epoch is not None:
            policy.after_epoch(share.position.epoch)
        # Always at the end of an epoch: the script's loop does not go back to the one before.
        is_due = ends_epoch or self.progress.steps % policy.commit_every == 0
        if is_due and self._generations is not None:
            self._state.commit()

    def _adapt(self, generations: Generations) -> None:
        """Adapt to the present ranks, in the same way on each of them."""
        while True:
            self._check_order()
            reason = None
            try:
                self._resize()
            except (HostsUpdatedInterrupt, PeerLostError) as exc:
                reason = generations.reason_of(exc)
            if reason is None:
                return
            generations.enter_next_generation(reason)

    def _resize(self) -> None:
        old, new = self.progress.num_ranks, sample_place(context.current())[1]
        if old == new:
            return
        progress = replace(self.progress, num_ranks=new)
        if self._policy.global_batch == "rescale":
            progress = replace(progress, global_batch=progress.batch_size * self._passes * new)
        if self._policy.on_resize is not None:
            self._policy.on_resize(old, new)
        self._state.progress = progress  # committed with the next step: until then a lost peer takes it all back

    def _check_order(self) -> None:
        if self.progress.order != self._order:
            raise UsageError(
                f"rank {context.current().topology.rank} has other data than rank 0: {self._order}, rank 0 has "
                f"{self.progress.order}. Make the same dataset and ud.shard() on every rank"
            )


def sample_place(runtime: Context) -> tuple[int, int]:
    """Return this rank's place among those that train on different samples, and how many there are."""
    return runtime.axis_rank(SAMPLE_AXES), runtime.axis_size(SAMPLE_AXES)


def passes_of_step(plan: Plan, *, keeps_division: bool = False) -> int:
    """Return the passes over a rank's batch that make a step; with `accumulate=N` a step is all of a window.

    Args:
        plan: of the run.
        keeps_division: the caller can rebind a model that is divided, see `unidist.strategy.KeepsDivision`.

    Raises:
        ConfigurationError: the steps of this plan cannot be transactions: a strategy divides the model, and the caller
            or the strategy cannot go on with that, or one adds up what is to be a mean.
    """
    if plan.divides_model:
        _check_division(plan, keeps_division=keeps_division)
    gate = plan.gate
    if gate is None:
        return 1
    if not gate.averages_passes:
        raise ConfigurationError(
            "elastic training takes the mean over the samples of a step, however many passes those are, and this run "
            "adds the passes up (accumulate:reduction=sum). Use their mean, or elastic=False and ud.elastic.run"
        )
    return gate.passes_per_update


def _check_division(plan: Plan, *, keeps_division: bool) -> None:
    dividing = [item.name for item in plan.strategies if item.axis not in (None, DATA_AXIS) and item.axis_size != 1]
    keeping = {item.name for item in plan.keeps_division}
    unable = [item.name for item in plan.strategies if item.name in dividing and item.name not in keeping]
    if unable or not keeps_division:
        names, how = unable or dividing, "the strategy" if unable else "this framework's step"
        what = {part for item in plan.strategies if item.name in names for part in item.axis_divides}
        thing = "the model" if "model" in what else "the tokens of each sample"
        raise ConfigurationError(
            f"elastic=True with {thing} divided by {' and '.join(names)}: when ranks change, {how} cannot go on with "
            "that. PyTorch's TrainStep and fit of Keras on TensorFlow can with pipeline and tensor. Leave "
            "elastic= out, or the strategy"
        )
    differing = [item.name for item in plan.strategies if isinstance(item, OutlivesGenerations)]
    if differing:
        raise ConfigurationError(
            f"strategy {differing[0]!r} lets ranks differ between two exchanges, and the model is divided by "
            f"{' and '.join(dividing)}: in an elastic job leave one of them out"
        )


def training_of(
    runtime: Context,
    choice: bool | Policy | None,
    make: Callable[[Member | None, Redistributable, Policy], StepTraining],
) -> StepTraining | None:
    """Return the `StepTraining` of a script's loop, just before the first step; None: steps are not transactions.

    Args:
        runtime: the context.
        choice: the user's; None: yes, if the job is elastic and the data can be redistributed.
        make: makes it.

    Raises:
        UsageError: elastic steps are requested, and the data cannot be redistributed, or the script uses another way
            of elastic training.
    """
    membership, data = runtime.membership, runtime.elastic_data
    if choice is False or (choice is None and membership is None):
        return None
    leader = None if membership is None else membership.generations
    if leader is not None and leader.is_function and choice is None:
        return None
    if leader is not None:
        raise UsageError(
            "elastic=True inside of a function of ud.elastic.run, which makes training elastic itself: leave one out"
            if leader.is_function
            else "this job is elastic, and another TrainStep keeps its state: use one, or elastic=False for both"
        )
    if data is None and choice is None:
        return None
    if data is None:
        raise UsageError(
            "elastic=True, and the batch does not come from data of ud.shard(): only that can be redistributed when "
            "ranks join or leave. Use for x, y in ud.shard(loader), or ud.elastic.run and your own sampler"
        )
    if not isinstance(data, Redistributable):
        raise UsageError(
            f"the batch comes from ud.shard() of {data.description}, which elastic training cannot redistribute when "
            "ranks join or leave: it needs data with a batch_size, no sampler of yours and no max_tokens. Or give "
            "TrainStep elastic=False, and divide the data yourself in a function of ud.elastic.run"
        )
    return make(membership, data, choice if isinstance(choice, Policy) else Policy())
