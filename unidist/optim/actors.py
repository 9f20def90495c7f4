"""Parameters between two updates: the access that a binding gives, and those that act on them there."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unidist.errors import PluginError, UsageError

if TYPE_CHECKING:
    from unidist.buffer import Buffer
    from unidist.optim.update import Update


class TrainedState(ABC):
    """Access to the parameters of one optimizer, and to what it keeps for them. Each adapter has its own.

    Parameters are numbered as in `Update.parameters`, which has their names, shapes and types.
    """

    @property
    def is_at_hand(self) -> bool:
        """Whether it can be read and written now; False where arrays belong to the script (JAX outside of a step)."""
        return True

    @abstractmethod
    def values(self) -> Sequence[Buffer]:
        """Return the present value of each parameter, flat, in memory that the caller may write to.

        It is the parameters' own memory where a framework lets others write to it, else a copy.

        Raises:
            UsageError: they are not at hand, or this rank has no whole ones (zero=3).
        """

    @abstractmethod
    def store(self, values: Sequence[Buffer]) -> None:
        """Give the parameters the values in the memory that `values` has returned, of all or of the first ones."""

    @abstractmethod
    def slots(self) -> Mapping[str, Buffer]:
        """Return the optimizer's floating-point tensors by a name that is the same on every rank, without scalars.

        Raises:
            UsageError: they are not at hand.
        """

    @abstractmethod
    def store_slots(self, slots: Mapping[str, Buffer]) -> None:
        """Give the optimizer the values in the memory that `slots` has returned."""


class ActsOnParameters(ABC):
    """Capability of a strategy, or of another observer of updates: reads or changes parameters between two updates.

    Its questions are asked once for each update, in this order, and have the same answers on every rank.
    """

    def acts_before(self, step: int, update: Update) -> bool:
        """Return whether `act_before` is wanted before an update. May be collective.

        Args:
            step: number of the update, from 1.
            update: of the optimizer whose update it is.
        """
        return False

    def act_before(self, step: int, update: Update, state: TrainedState) -> None:  # noqa: B027 - most do nothing
        """Look at the parameters as they were before the update, and leave them as they are."""

    @abstractmethod
    def acts_after(self, step: int, update: Update) -> bool:
        """Return whether `act_after` is wanted after update number `step`, which was made."""

    @abstractmethod
    def act_after(self, step: int, update: Update, state: TrainedState) -> None:
        """Act on the parameters: `values = state.values()`, change them, `state.store(values)`. May be collective.

        `update.communicator` connects the ranks that exchange gradients. In a compiled step the optimizer's slots are
        not at hand.
        """

    def act_at_end(self, update: Update, state: TrainedState) -> None:  # noqa: B027 - most have nothing to do there
        """Act when the framework has given the parameters other values at the end of training. May be collective.

        Keras does, where an optimizer keeps moving averages (`use_ema`).
        """


class Actors:
    """Those that act on the parameters of one optimizer, for the binding that calls them.

    A binding calls this around each inner step of update n:

        wanted_before(n), and if so act_before(n, state)
        ...                     the inner step
        wanted_after(n), and if so act_after(n, state)

    If a step is compiled, the questions may come together after it; `act_before` then gets the old values.

    Attributes:
        names: of those that act, for messages.

    Args:
        update: of the optimizer.
        actors: that follow its updates; at least one.
    """

    def __init__(self, update: Update, actors: Sequence[ActsOnParameters]) -> None:
        self._reference = weakref.ref(update)  # which has this
        self._all = actors
        self.names = ", ".join(getattr(each, "name", type(each).__name__) for each in actors)
        self._before: list[ActsOnParameters] = []
        self._after: list[ActsOnParameters] = []
        self._num_unasked = 0

    @property
    def _update(self) -> Update:
        update = self._reference()
        assert update is not None, "its actors are asked through it"
        return update

    @property
    def is_behind(self) -> bool:
        """Whether an update was applied about which nobody was asked: a compiled step asks when it has run."""
        return self._num_unasked > 0

    def wanted_before(self, step: int) -> bool:
        """Return whether any of them wants to look at the parameters before an update. Collective."""
        self._before = [each for each in self._all if each.acts_before(step, self._update)]
        return bool(self._before)

    def act_before(self, step: int, state: TrainedState) -> None:
        """Let those look at them that want to."""
        for each in self._before:
            each.act_before(step, self._update, state)

    def wanted_after(self, step: int) -> bool:
        """Return whether any of them wants to act after an update."""
        self._num_unasked = 0
        self._after = [each for each in self._all if each.acts_after(step, self._update)]
        return bool(self._after)

    def act_after(self, step: int, state: TrainedState) -> None:
        """Let those act that want to. Collective."""
        for each in self._after:
            each.act_after(step, self._update, state)

    def act_at_end(self, state: TrainedState) -> None:
        """Let all of them act at the end of training. Collective."""
        for each in self._all:
            each.act_at_end(self._update, state)

    def count_update(self) -> None:
        """Note that an update was applied: its question comes before that, or before the next update.

        Raises:
            PluginError: the binding does not ask.
        """
        self._num_unasked += 1
        if self._num_unasked > 1:
            raise PluginError(
                f"{self.names}: acts on parameters between two updates, and this way to train does not let it: steps "
                "that run elsewhere (pipeline, zero=3 on JAX, the engine xla), optimizers of TF1, or an adapter "
                "without `Update.actors`. Leave the strategy out, or use `data`"
            )


def check_keeps_parameters(inner: Any, names: str = "a strategy") -> None:
    """Raise UsageError if an inner step does not step on the model's own parameters (its `keeps_parameters`).

    Args:
        inner: of a bound optimizer.
        names: of those that act.
    """
    if not inner.keeps_parameters:
        raise UsageError(
            f"{names}: acts on parameters between two updates, and here the update does not use this rank's own "
            "parameters as they are: it keeps copies (precision or offload beside zero), or holds parts (zero=3), or "
            "fetches them from servers. Use zero=1 or zero=2 without these, or data"
        )


__all__ = ["Actors", "ActsOnParameters", "TrainedState", "check_keeps_parameters"]
