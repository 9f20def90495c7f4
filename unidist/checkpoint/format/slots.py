"""The table of the frameworks' names for the same optimizer state: slots, steps and options.

A *slot* is a tensor of optimizer state that belongs to a parameter. In a checkpoint slots have neutral names, so that
one framework can load what another one saved. A *dialect* is the set of names of one framework: a column of the table.
Slots of optimizers that are not in the table keep their own names; their checkpoints load in the same dialect.

Slots with the same meaning may differ by a factor: the momentum of Keras' SGD is `-learning_rate` times PyTorch's.
Data are saved unchanged, and multiplied only when loaded in another dialect, so loading in the same one is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from unidist.errors import CheckpointError

TORCH, KERAS, OPTAX = "torch", "keras", "optax"


@dataclass(frozen=True)
class StateSlot:
    """One meaning.

    Args:
        neutral: its name in a checkpoint.
        names: its name in each dialect that has it.
        per_learning_rate: dialects that keep this much times the learning rate times what the others keep.
    """

    neutral: str
    names: Mapping[str, str]
    per_learning_rate: Mapping[str, float] = field(default_factory=dict)

    def factor(self, source: str, target: str, learning_rate: float | None) -> float:
        """Return what data of one dialect are to be multiplied by in another; the rate is None if it is not known."""
        per_rate = self.per_learning_rate.get(source), self.per_learning_rate.get(target)
        if source == target or per_rate[0] == per_rate[1]:
            return 1.0
        if learning_rate is None:
            raise CheckpointError(
                f"optimizer state {self.neutral!r} of {source} differs from that of {target} by the learning rate, "
                "which was not saved: save with optax.inject_hyperparams, or load without the optimizer."
            )

        def scale(dialect: str) -> float:
            factor = self.per_learning_rate.get(dialect)
            return 1.0 if factor is None else factor * learning_rate

        if scale(source) == 0.0:
            raise CheckpointError(
                f"optimizer state {self.neutral!r} was saved in units of the learning rate, which was 0 then: what it "
                "means elsewhere cannot be computed. Save at another learning rate, or load without the optimizer."
            )
        return scale(target) / scale(source)


@dataclass(frozen=True)
class Family:
    """Optimizers that compute the same.

    Args:
        members: class names, by dialect; subclasses belong to it too. Of optax those of states, which do not tell
            Adam from what has the same state (Adamax, Lamb).
        slots: of these optimizers.
        options: their options by neutral names, each as the dialects call it ("betas.0": the first of a tuple).
        counts_steps: an update depends on how many there were before.
    """

    members: Mapping[str, frozenset[str]]
    slots: tuple[StateSlot, ...]
    options: Mapping[str, Mapping[str, str]]
    counts_steps: bool = True


def _names(torch: str, keras: str, optax: str | None = None) -> dict[str, str]:
    names = {TORCH: torch, KERAS: keras}
    return names if optax is None else {**names, OPTAX: optax}


_LEARNING_RATE = {"learning_rate": _names("lr", "learning_rate", "learning_rate")}
_BETAS = {
    **_LEARNING_RATE,
    "beta1": _names("betas.0", "beta_1"),
    "beta2": _names("betas.1", "beta_2"),
    "amsgrad": _names("amsgrad", "amsgrad"),
}
_FIRST = StateSlot("first_moment", _names("exp_avg", "momentum", "mu"))

FAMILIES = (
    Family(
        {
            TORCH: frozenset(("Adam", "AdamW", "SparseAdam")),
            KERAS: frozenset(("Adam", "AdamW")),
            OPTAX: frozenset(("ScaleByAdamState",)),
        },
        (
            _FIRST,
            StateSlot("second_moment", _names("exp_avg_sq", "velocity", "nu")),
            StateSlot("max_second_moment", _names("max_exp_avg_sq", "velocity_hat")),
        ),
        _BETAS,
    ),
    Family(
        {TORCH: frozenset(("Adamax",)), KERAS: frozenset(("Adamax",))},
        (_FIRST, StateSlot("infinity_norm", _names("exp_inf", "norm"))),
        _BETAS,
    ),
    Family(
        {TORCH: frozenset(("SGD",)), KERAS: frozenset(("SGD",)), OPTAX: frozenset(("TraceState",))},
        (StateSlot("gradient_momentum", _names("momentum_buffer", "momentum", "trace"), {KERAS: -1.0}),),
        {
            **_LEARNING_RATE,
            "momentum": _names("momentum", "momentum"),
            "nesterov": _names("nesterov", "nesterov"),
        },
        counts_steps=False,
    ),
    Family(
        {
            TORCH: frozenset(("RMSprop",)),
            KERAS: frozenset(("RMSprop",)),
            OPTAX: frozenset(("ScaleByRmsState", "ScaleByRStdDevState")),
        },
        (
            StateSlot("mean_square", _names("square_avg", "velocity", "nu")),
            StateSlot("mean_gradient", _names("grad_avg", "average_gradient", "mu")),
            StateSlot(
                "scaled_gradient_momentum",
                _names("momentum_buffer", "momentum", "trace"),
                {KERAS: 1.0, OPTAX: -1.0},
            ),
        ),
        {
            **_LEARNING_RATE,
            "decay": _names("alpha", "rho"),
            "momentum": _names("momentum", "momentum"),
            "centered": _names("centered", "centered"),
        },
    ),
    Family(
        {TORCH: frozenset(("Adagrad",)), KERAS: frozenset(("Adagrad",)), OPTAX: frozenset(("ScaleByRssState",))},
        (StateSlot("sum_of_squares", _names("sum", "accumulator", "sum_of_squares")),),
        _LEARNING_RATE,
    ),
    Family(
        {
            TORCH: frozenset(("Adadelta",)),
            KERAS: frozenset(("Adadelta",)),
            OPTAX: frozenset(("ScaleByAdaDeltaState",)),
        },
        (
            StateSlot("mean_square", _names("square_avg", "accumulated_grad", "e_g")),
            StateSlot("mean_square_update", _names("acc_delta", "accumulated_delta_var", "e_x")),
        ),
        {**_LEARNING_RATE, "decay": _names("rho", "rho")},
    ),
)


@dataclass(frozen=True)
class OptimizerNaming:
    """The names that one optimizer uses for its state.

    Args:
        dialect: a column of the table.
        kinds: names of the optimizer's class and its bases, the class first.
    """

    dialect: str
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, dialect: str, kind: type) -> OptimizerNaming:
        """Return the naming of an optimizer's class (of the plain one, before it was bound)."""
        return cls(dialect, tuple(dict.fromkeys(base.__name__ for base in kind.__mro__ if base is not object)))

    @property
    def family(self) -> Family | None:
        """The family of the first base that has one."""
        for kind in self.kinds:
            for family in FAMILIES:
                if kind in family.members.get(self.dialect, ()):
                    return family
        return None

    def neutral(self, slot: str) -> str:
        """Return the neutral name of a slot; its own where the table has none."""
        found = self._find(native=slot)
        return slot if found is None else found.neutral

    def native(self, neutral: str) -> str:
        """Return this optimizer's name for a slot with a neutral name."""
        found = self._find(neutral=neutral)
        return neutral if found is None else found.names.get(self.dialect, neutral)

    def factor(self, neutral: str, saved: OptimizerNaming, learning_rate: float | None) -> float:
        """Return the factor for the data of a slot that `saved` has written, for use by this optimizer.

        Raises:
            CheckpointError: the learning rate was 0 or is not known, and the slot is in its units.
        """
        found = self._find(neutral=neutral)
        return 1.0 if found is None else found.factor(saved.dialect, self.dialect, learning_rate)

    def check_reads(self, saved: OptimizerNaming) -> None:
        """Raise CheckpointError if what `saved` has written means nothing to this optimizer."""
        same_family = self.family is not None and self.family is saved.family
        same_kind = self.dialect == saved.dialect and _first(self.kinds) == _first(saved.kinds)
        if not (same_family or same_kind):
            raise CheckpointError(
                f"the optimizer state was saved by {_first(saved.kinds)} ({saved.dialect}), and {_first(self.kinds)} "
                f"({self.dialect}) cannot go on with it. Use the same kind of optimizer, or load the model alone."
            )

    def has_slot(self, neutral: str) -> bool:
        """Return whether the table knows the slot; it then has its parameter's shape."""
        return self._find(neutral=neutral) is not None

    def option(self, options: Mapping[str, object], neutral: str) -> object:
        """Return an option by its neutral name, or None where there is none."""
        if self.family is None:
            names = _LEARNING_RATE.get(neutral, {})
        else:
            names = dict(self.family.options.get(neutral, {}))
        key, _, index = names.get(self.dialect, "").partition(".")
        value = options.get(key)
        if index and isinstance(value, list | tuple):
            return value[int(index)]
        return value

    def _find(self, *, native: str | None = None, neutral: str | None = None) -> StateSlot | None:
        for slot in self.family.slots if self.family is not None else ():
            if slot.neutral == neutral or (native is not None and slot.names.get(self.dialect) == native):
                return slot
        return None


def _first(kinds: Iterable[str]) -> str:
    return next(iter(kinds), "an optimizer")
