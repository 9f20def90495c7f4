"""Steps of `TrainStep` as transactions, for elastic jobs: the state to keep, and the pieces of a global batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from typing_extensions import override

from unidist.checkpoint.format.interface import KeepsState
from unidist.elastic.batches import BatchShare
from unidist.elastic.durable.parts import DurableParts, parts_of
from unidist.elastic.handlers import GeneratorsHandler, StatefulHandler
from unidist.elastic.state import Handler, ObjectState, SharedHandler
from unidist.elastic.step_training import Policy, Progress
from unidist.errors import UsageError
from unidist_jax.checkpoint import JaxStates, Training, kept_training
from unidist_jax.elastic.state import TreeHandler, ending_programs


class TrainingState(ObjectState):
    """Parameters, optimizer state, progress and the other state of training.

    Args:
        training: what holds them, the same on every rank.
        progress: of the training; an attribute.
        others: objects with `state_dict` and `load_state_dict`.
    """

    progress: Progress

    def __init__(self, training: Training, progress: Progress, others: Mapping[str, Any]) -> None:
        self._trained, self._others = training, others
        handlers: dict[str, Handler] = {f"state.{name}": StatefulHandler(value) for name, value in others.items()}
        is_sharded = training.optimizer.binding.inner.sharded
        if not training.holds_pieces:
            handlers["trees"] = _TrainedTrees(training, whole=not is_sharded)
        if is_sharded:
            handlers["shards"] = SharedHandler(training, _shards, JaxStates.framework.convert)
        handlers["generators"] = GeneratorsHandler(None)
        super().__init__(handlers=handlers, progress=progress)

    @override
    def durable_parts(self) -> DurableParts:
        parameters, optimizer = kept_training(self._trained)
        others = {f"state.{name}": value for name, value in self._others.items()}
        return parts_of(JaxStates(), {"model": parameters}, {"optimizer": optimizer}, others, self._plain_sections())


class _TrainedTrees(TreeHandler):
    """The trees of a `TrainStep`, which has others after each step.

    Args:
        training: the step.
        whole: the optimizer state is whole on this rank, and kept here, too.
    """

    def __init__(self, training: Training, *, whole: bool) -> None:
        self._training, self._whole = training, whole
        super().__init__(None, keeps_previous=not whole)

    def _get(self) -> tuple[Any, Any]:
        return self._training.held, self._training.opt_state if self._whole else None

    def _put(self, held: Any, opt_state: Any) -> None:
        self._training.held = held
        if self._whole:
            self._training.opt_state = opt_state

    @override
    def save(self) -> None:
        self.value = self._get()
        super().save()

    @override
    def restore(self) -> None:
        super().restore()
        self._put(*self.value)

    @override
    def sync(self) -> None:
        self.value = self._get()
        super().sync()
        self._put(*self.value)


def _shards(training: Training) -> dict[str, KeepsState]:
    """Return the states of what a `TrainStep` has pieces of."""
    parameters, optimizer = kept_training(training)
    states = {"optimizer": optimizer.kept_state()}
    return {"model": parameters.kept_state(), **states} if training.holds_pieces else states


class PiecewiseStep:
    """Trains on a rank's share of a global batch, in micro-batches, so that the mean is over all samples of all ranks.

    Args:
        run: trains on a micro-batch, whose loss has a weight: `run(batch, weight)` returns the mean over the ranks.
        accumulate: sets the number of micro-batches of an update.
    """

    def __init__(self, run: Callable[[Any, float], Any], accumulate: Callable[[int], None]) -> None:
        self._run = run
        self._accumulate = accumulate

    def train(self, share: BatchShare, batch: Any, *, batch_size: int) -> float:
        """Update the parameters. Collective; every rank has as many micro-batches.

        Args:
            share: of the batch.
            batch: a tree of arrays, with all of this rank's samples; if it has none, with one that does not count.
            batch_size: samples of a micro-batch, at most.

        Returns:
            The mean loss over the samples of all ranks.
        """
        pieces, count = share.pieces(batch_size), max(len(share.indices), 1)
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch)]
        if len(pieces) > 1 and not any(shape[:1] == (count,) for shape in shapes):
            raise UsageError(
                f"this rank has {count} samples of this step and takes them in {len(pieces)} micro-batches of at most "
                f"{batch_size}, but no array has {count} rows: {[list(shape) for shape in shapes]}. Give the samples "
                "along the first dim, or use ud.elastic.Policy(global_batch='rescale')"
            )

        def cut(leaf: Any) -> Any:
            return leaf[start:stop] if np.shape(leaf)[:1] == (count,) else leaf

        with ending_programs():
            self._accumulate(len(pieces))
            total = 0.0
            for first, end in pieces:
                start, stop = (first, end) if end > first else (0, 1)
                part = batch if (start, stop) == (0, count) else jax.tree.map(cut, batch)
                total += float(self._run(part, share.weight(end - first)))
        return total


def translating(policy: Policy) -> Policy:
    """Return a policy whose hooks raise unidist's errors where compiled programs in them fail."""
    hooks = ("after_step", "after_epoch", "on_resize")
    return dataclasses.replace(policy, **{name: _ending(getattr(policy, name)) for name in hooks})


def _ending(hook: Callable[..., object] | None) -> Any:
    if hook is None:
        return None

    @functools.wraps(hook)
    def run(*args: Any) -> object:
        with ending_programs():
            return hook(*args)

    return run
