"""Elastic training by a flag: the script keeps its own loop, and each step is a transaction.

A step that lost a peer does not count, and leaves everything as it was at the last commit. The data knows how far
training has come, so the script's loop gets the same samples again, dealt out to the ranks that there are now; nothing
in the loop needs to know. Framework-free; the adapters' training steps use it.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from unidist.elastic.batches import Deal, Position, SampleOrder
from unidist.elastic.generations import Generations, leaving_on_sigterm
from unidist.elastic.state import HostsUpdatedInterrupt, ObjectState
from unidist.errors import ConfigurationError, PeerLostError, UsageError
from unidist.runtime import context
from unidist.strategy.interface import UpdateGate

if TYPE_CHECKING:
    from unidist.control.elastic.member import Member
    from unidist.runtime.context import Context
    from unidist.strategy.interface import Plan

GlobalBatch = Literal["keep", "rescale"]


@dataclass(frozen=True)
class Policy:
    """How a training step follows a world that changes; `TrainStep(..., elastic=True)` is all the defaults.

    In a job whose ranks do not change, samples are dealt out and hooks called alike.

    Args:
        global_batch: "keep": a step takes as many samples as at the beginning, `batch_size` times the ranks (and
            times N with `accumulate=N`), in micro-batches of at most `batch_size`; "rescale": each rank takes
            `batch_size`, so a step takes other numbers of samples with other numbers of ranks: change the learning rate
            in `on_resize`.
        commit_every: steps from one commit to the next. What was done since the last one is done again when a rank is
            lost, and ranks come and go at commits only.
        state: what belongs to training besides model, optimizer and data, by any name: objects with `state_dict` and
            `load_state_dict` (a scheduler).
        after_step: called at the end of every step, as a part of it: what it does to the `state` counts exactly once.
        after_epoch: called with the number of the epoch at the end of its last step, as a part of it.
        on_resize: called with the old and the new number of ranks, on every rank alike, when it has changed.

    Raises:
        UsageError: an unknown way to deal with the batch, or commits less often than each step at the most.
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
    """How far training has come: a part of the state, equal on all ranks.

    Args:
        order: of the samples.
        batch_size: samples of a rank's micro-batch.
        global_batch: samples of a step.
        num_ranks: that take them.
        position: of the next step.
        steps: that were taken.
        loss: of the last one; NaN: there was none.
    """

    order: SampleOrder
    batch_size: int
    global_batch: int
    num_ranks: int
    position: Position = field(default_factory=Position)
    steps: int = 0
    loss: float = math.nan


class DealsAnew(ABC):
    """Data that can be dealt out anew in the middle of an epoch.

    Whoever iterates over it sets `feed` of the context to it with each batch.

    Attributes:
        order: of its samples.
        batch_size: of one rank.
    """

    order: SampleOrder
    batch_size: int | None

    @abstractmethod
    def follow(self, progress: Callable[[], Progress]) -> None:
        """From now on deal out what is left of the epochs, as `progress` says whenever a batch is asked for."""

    @abstractmethod
    def take(self) -> Deal | None:
        """Return what was dealt with the last batch, once: None if it was taken before.

        Raises:
            UsageError: there was no batch.
        """


class StepTraining:
    """The steps of a script's own loop, through the generations of an elastic job. Every rank uses it alike.

    Args:
        membership: of this process; None in a job whose ranks do not change, where nothing is kept.
        feed: the data of the loop.
        policy: the user's choices.
        make_state: makes a state of the model, the optimizer and so on, with the attribute `progress` as given.
            Collective where each rank keeps a share.
        passes: over a rank's batch that make a step, see `passes_of_step`.
    """

    def __init__(
        self,
        membership: Member | None,
        feed: DealsAnew,
        policy: Policy,
        make_state: Callable[[Progress], ObjectState],
        *,
        passes: int = 1,
    ) -> None:
        assert feed.batch_size is not None, "data that is dealt out has batches"
        size = context.current().topology.world_size
        self._feed, self._policy = feed, policy
        self._order = feed.order
        self._passes = passes
        self._generations: Generations | None = None
        progress = Progress(feed.order, feed.batch_size, feed.batch_size * passes * size, size)
        if membership is None:
            self._state: Any = ObjectState(progress=progress)
        else:
            self._state = make_state(progress)
            self._generations = Generations(membership, self._state, is_function=False)
            self._leaving = contextlib.ExitStack()  # for as long as the process lives: its script may go on as it likes
            self._leaving.enter_context(leaving_on_sigterm(membership))
            self._generations.begin()
            self._settle(self._generations)
        feed.follow(lambda: self.progress)

    @property
    def progress(self) -> Progress:
        """How far training has come."""
        found: Progress = self._state.progress
        return found

    def step(self, train: Callable[[Deal], float]) -> float:
        """Take a step with the batch that was dealt last, or forget that batch where the world has changed.

        Args:
            train: trains on the batch that was dealt so; returns the mean loss over the samples of all ranks.

        Returns:
            The loss of the last step that counts, equal on every rank.

        Raises:
            UsageError: there is no batch that was not given before.
            SystemExit, StalledError, StateLostError: see `Generations.go_on`.
            PeerLostError: in a job whose ranks do not change.
        """
        deal = self._feed.take()
        if deal is None:
            raise UsageError(
                "step() was called twice with one batch: in an elastic job each batch of the sharded data is given to "
                "it once. Use elastic=False and ud.elastic.run for another kind of loop"
            )
        if not self._is_next(deal):
            return self.progress.loss
        if self._generations is None:
            self._take_step(deal, train)
            return self.progress.loss
        reason = None
        try:
            self._take_step(deal, train)
        except (HostsUpdatedInterrupt, PeerLostError) as exc:
            reason = self.reason_of(exc)
        if reason is not None:  # after the exception is forgotten: its frames hold on to the old generation
            self.go_on(reason)
        return self.progress.loss

    def _is_next(self, deal: Deal) -> bool:
        """Say whether it is what the ranks take now.

        It is not where this rank has just come, and the others are further; nor where a first batch was dealt before
        it was known that a step takes several.
        """
        place, now = context.current().topology, self.progress
        left = now.order.length(now.global_batch) - now.position.processed
        is_whole = deal.total >= min(now.global_batch, left)
        return is_whole and (deal.position, deal.rank, deal.size) == (now.position, place.rank, place.world_size)

    def reason_of(self, exc: HostsUpdatedInterrupt | PeerLostError) -> str:
        """Return what was lost, for `go_on`; raise the error again in a job whose ranks do not change."""
        if self._generations is None:
            raise exc
        return self._generations.reason_of(exc)

    def go_on(self, reason: str) -> None:
        """Come into another generation, with the state of the last commit; after a loss outside of `step`.

        Args:
            reason: see `Generations.go_on`, which see for what it raises, too.
        """
        assert self._generations is not None, "reason_of has raised"
        self._generations.go_on(reason)
        self._settle(self._generations)

    def skip_to(self, epoch: int) -> None:
        """Leave out what comes before an epoch. Every rank alike; committed with the next step."""
        self._state.progress = replace(self.progress, position=Position(epoch))

    def finish(self) -> None:
        """Training has come to an end, for now: make a checkpoint, where there are any. Collective."""
        self._state.finish()

    def _take_step(self, deal: Deal, train: Callable[[Deal], float]) -> None:
        policy, before = self._policy, self.progress
        loss = train(deal)
        self._state.progress = replace(before, position=deal.following, steps=before.steps + 1, loss=loss)
        if policy.after_step is not None:
            policy.after_step()
        ends_epoch = deal.following.epoch > deal.position.epoch
        if ends_epoch and policy.after_epoch is not None:
            policy.after_epoch(deal.position.epoch)
        # Always at the end of an epoch: the script's loop does not go back to the one before.
        is_due = ends_epoch or self.progress.steps % policy.commit_every == 0
        if is_due and self._generations is not None:
            self._state.commit()

    def _settle(self, generations: Generations) -> None:
        """Adapt to the ranks that there are now, and on all of them alike."""
        while True:
            self._check_order()
            reason = None
            try:
                self._resize()
            except (HostsUpdatedInterrupt, PeerLostError) as exc:
                reason = generations.reason_of(exc)
            if reason is None:
                return
            generations.go_on(reason)

    def _resize(self) -> None:
        old, new = self.progress.num_ranks, context.current().topology.world_size
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
                f"{self.progress.order}. Make dataset and ud.shard() alike on every rank"
            )


def passes_of_step(plan: Plan) -> int:
    """Return the passes over a rank's batch that make a step; with `accumulate=N` a step is all of a window.

    Raises:
        ConfigurationError: the steps of this plan cannot be transactions: a strategy divides the model, or adds up
            what is to be a mean.
    """
    if plan.model_axes:
        raise ConfigurationError(
            f"elastic=True, and this run divides the model along {', '.join(plan.model_axes)}: what a lost rank holds "
            "of it, no other rank has. Leave elastic= out, or the strategy"
        )
    gate = plan.find(UpdateGate)
    if gate is None:
        return 1
    if not gate.averages_passes:
        raise ConfigurationError(
            "elastic training takes the mean over the samples of a step, however many passes those are, and this run "
            "adds the passes up (accumulate:reduction=sum). Use their mean, or elastic=False and ud.elastic.run"
        )
    return gate.passes_per_update


def training_of(
    runtime: Context, choice: bool | Policy | None, make: Callable[[Member | None, DealsAnew, Policy], StepTraining]
) -> StepTraining | None:
    """Return what takes the steps of a script's loop, when the first one is about to be taken; None: nothing special.

    Args:
        runtime: the context.
        choice: the user's; None: where the job is elastic and the data can be dealt anew.
        make: makes it.

    Raises:
        UsageError: it is asked for, and the data cannot be dealt anew, or something else leads through the generations.
    """
    membership, feed = runtime.membership, runtime.feed
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
    if feed is None and choice is None:
        return None
    if feed is None:
        raise UsageError(
            "elastic=True, and the batch does not come from data of ud.shard(): only that can be dealt out anew when "
            "ranks come and go. Use for x, y in ud.shard(loader), or ud.elastic.run and a sampler of your own"
        )
    return make(membership, feed, choice if isinstance(choice, Policy) else Policy())
