"""The table of the frameworks' names for the same optimizer state: slots, steps and options.

A *slot* is a tensor of optimizer state that belongs to a parameter. In a checkpoint slots have neutral names, so that
one framework can load what another one saved. A *dialect* is the set of names of one framework: a column of the table.
Slots of optimizers that are not in the table keep their own names; their checkpoints load in the same dialect.

Slots with the same meaning may differ by a factor: the momentum of Keras' SGD is `-learning_rate` times PyTorch's.
Data are saved unchanged, and multiplied only when loaded in another dialect, so loading in the same one is exact.

One optimizer may treat some parameters by one rule and some by another (Muon, and Adam for the rest). So a family is
that of a parameter: of those that the optimizer's class is in, the one that has all of the parameter's slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from unidist.errors import CheckpointError

TORCH, KERAS, OPTAX = "torch", "keras", "optax"


@dataclass(frozen=True)
class Unit:
    """What a dialect keeps is a multiple of what the others keep, which an option decides.

    Args:
        option: its neutral name.
        factor: times this.
        of_sum: divided by 1 minus the option: a sum whose terms decay by it, where the others keep the average.
    """

    option: str
    factor: float = 1.0
    of_sum: bool = False

    def scale(self, value: float) -> float:
        """Return the multiple, for a value of the option; 0 where there is none."""
        if self.of_sum:
            return self.factor / (1.0 - value) if value < 1.0 else 0.0
        return self.factor * value


@dataclass(frozen=True)
class StateSlot:
    """One meaning.

    Args:
        neutral: its name in a checkpoint.
        names: its name in each dialect that has it.
        units: of dialects that keep a multiple.
    """

    neutral: str
    names: Mapping[str, str]
    units: Mapping[str, Unit] = field(default_factory=dict)

    def factor(
        self, source: str, target: str, saved: Mapping[str, float | None], own: Mapping[str, float | None]
    ) -> float:
        """Return what data of one dialect are to be multiplied by in another.

        Args:
            source: the dialect that has saved.
            target: the dialect that loads.
            saved: options of the optimizer that has saved, by neutral names.
            own: likewise, of the one that loads. Of an option that one of them does not know the other's counts.
        """
        units = self.units.get(source), self.units.get(target)
        if source == target or units[0] == units[1]:
            return 1.0
        scales = [1.0, 1.0]
        for place, (unit, options, others) in enumerate(zip(units, (saved, own), (own, saved), strict=True)):
            if unit is None:
                continue
            value = options.get(unit.option)
            value = others.get(unit.option) if value is None else value
            what = unit.option.replace("_", " ")
            if value is None:
                raise CheckpointError(
                    f"optimizer state {self.neutral!r} of {source} differs from that of {target} by the {what}, "
                    "which was not saved: save with optax.inject_hyperparams, or load without the optimizer."
                )
            scales[place] = unit.scale(value)
            if unit.scale(value) == 0.0 and place == 0:
                raise CheckpointError(
                    f"optimizer state {self.neutral!r} was saved in units of the {what}, which was {value:g} then: "
                    f"what it means elsewhere cannot be computed. Save at another {what}, or load without the "
                    "optimizer."
                )
        return scales[1] / scales[0]


@dataclass(frozen=True)
class Family:
    """Optimizers that compute the same for a parameter.

    Args:
        name: in checkpoints, and in messages.
        members: class names, by dialect; subclasses belong to it too. Those of the framework alone where the name
            begins with the framework's: scripts write classes of this name that keep something else. Of optax those
            of states, which do not tell Adam from what has the same state (Adamax, Lamb).
        slots: of these optimizers.
        options: their options by neutral names, each as the dialects call it ("betas.0": the first of a tuple).
        counts_steps: an update depends on how many there were before; where no dialect's does, it is False, and where
            some dialects' do, the set of them.
    """

    name: str
    members: Mapping[str, frozenset[str]]
    slots: tuple[StateSlot, ...]
    options: Mapping[str, Mapping[str, str]]
    counts_steps: frozenset[str] = frozenset((TORCH, KERAS, OPTAX))

    def slot_names(self, dialect: str) -> set[str]:
        """Return the dialect's names of the slots."""
        return {slot.names[dialect] for slot in self.slots if dialect in slot.names}


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
_WITH_ADAM = {
    TORCH: frozenset(("MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam")),
    KERAS: frozenset(("keras.Muon",)),
}
"""Classes that have Muon for some parameters, and Adam for the others."""
_FIRST = StateSlot("first_moment", _names("exp_avg", "momentum", "mu"))

FAMILIES = (
    Family(
        "muon",
        {
            TORCH: frozenset(("torch.Muon",)) | _WITH_ADAM[TORCH],
            KERAS: _WITH_ADAM[KERAS],
            OPTAX: frozenset(("MuonState",)),
        },
        (
            StateSlot(
                "gradient_average",
                _names("momentum_buffer", "momentum", "mu"),
                {KERAS: Unit("momentum", of_sum=True)},
            ),
        ),
        {**_LEARNING_RATE, "momentum": _names("momentum", "momentum")},
        counts_steps=frozenset((OPTAX,)),
    ),
    Family(
        "adam",
        {
            TORCH: frozenset(("Adam", "AdamW", "SparseAdam")) | _WITH_ADAM[TORCH],
            KERAS: frozenset(("Adam", "AdamW")) | _WITH_ADAM[KERAS],
            OPTAX: frozenset(("ScaleByAdamState",)),
        },
        (
            _FIRST,
            StateSlot("second_moment", _names("exp_avg_sq", "velocity", "nu")),
            StateSlot("max_second_moment", _names("max_exp_avg_sq", "velocity_hat")),
        ),
        {**_BETAS, "learning_rate_ratio": {KERAS: "adam_lr_ratio"}},
    ),
    Family(
        "adamax",
        {TORCH: frozenset(("Adamax",)), KERAS: frozenset(("Adamax",))},
        (_FIRST, StateSlot("infinity_norm", _names("exp_inf", "norm"))),
        _BETAS,
    ),
    Family(
        "sgd",
        {TORCH: frozenset(("SGD",)), KERAS: frozenset(("SGD",)), OPTAX: frozenset(("TraceState",))},
        (
            StateSlot(
                "gradient_momentum",
                _names("momentum_buffer", "momentum", "trace"),
                {KERAS: Unit("learning_rate", -1.0)},
            ),
        ),
        {
            **_LEARNING_RATE,
            "momentum": _names("momentum", "momentum"),
            "nesterov": _names("nesterov", "nesterov"),
        },
        counts_steps=frozenset(),
    ),
    Family(
        "rmsprop",
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
                {KERAS: Unit("learning_rate"), OPTAX: Unit("learning_rate", -1.0)},
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
        "adagrad",
        {TORCH: frozenset(("Adagrad",)), KERAS: frozenset(("Adagrad",)), OPTAX: frozenset(("ScaleByRssState",))},
        (StateSlot("sum_of_squares", _names("sum", "accumulator", "sum_of_squares")),),
        _LEARNING_RATE,
    ),
    Family(
        "adadelta",
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
        known: the families that its parameters may be of; default: those of the first of these names that has any.
    """

    dialect: str
    kinds: tuple[str, ...]
    known: tuple[Family, ...] | None = None

    @classmethod
    def of(cls, dialect: str, kind: type) -> OptimizerNaming:
        """Return the naming of an optimizer's class (of the plain one, before it was bound)."""
        bases = [base for base in kind.__mro__ if base is not object]
        names = [(base.__name__, f"{base.__module__.partition('.')[0]}.{base.__name__}") for base in bases]
        return cls(dialect, tuple(dict.fromkeys(base.__name__ for base in bases)), _families(dialect, names))

    @property
    def families(self) -> tuple[Family, ...]:
        """The families that its parameters may be of."""
        return _families(self.dialect, [(kind,) for kind in self.kinds]) if self.known is None else self.known

    @property
    def family(self) -> Family | None:
        """The family of every parameter; None if there is none, or if it depends on the parameter."""
        families = self.families
        return families[0] if len(families) == 1 else None

    def of_family(self, name: str) -> OptimizerNaming:
        """Return the naming for parameters of one family, by its name."""
        return replace(self, known=tuple(family for family in FAMILIES if family.name == name))

    def of_parameter(self, slots: Collection[str]) -> OptimizerNaming:
        """Return the naming for a parameter that has these slots; names are the optimizer's."""
        fitting = [each for each in self.families if slots and set(slots) <= each.slot_names(self.dialect)]
        return replace(self, known=(fitting[0],)) if fitting else self

    def neutral(self, slot: str) -> str:
        """Return the neutral name of a slot; its own where the table has none."""
        found = self._find(native=slot)
        return slot if found is None else found.neutral

    def native(self, neutral: str) -> str:
        """Return this optimizer's name for a slot with a neutral name."""
        found = self._find(neutral=neutral)
        return neutral if found is None else found.names.get(self.dialect, neutral)

    def factor(
        self,
        neutral: str,
        saved: OptimizerNaming,
        options: Mapping[str, float | None],
        own: Mapping[str, float | None] | None = None,
    ) -> float:
        """Return the factor for the data of a slot that `saved` has written, for use by this optimizer.

        Args:
            neutral: name of the slot.
            saved: the naming of the optimizer that wrote it.
            options: of that one, see `OptimizerRecord.options_of`.
            own: options of this one that the checkpoint does not set.

        Raises:
            CheckpointError: the slot is in units of an option that was 0 or is not known.
        """
        found = self._find(neutral=neutral)
        return 1.0 if found is None else found.factor(saved.dialect, self.dialect, options, own or {})

    def reads(self, saved: OptimizerNaming) -> bool:
        """Return whether what `saved` has written of a parameter means something to this optimizer."""
        if saved.family is not None and self.families:
            return saved.family in self.families
        return self.dialect == saved.dialect and _first(self.kinds) == _first(saved.kinds)

    def reading(self, saved: OptimizerNaming) -> OptimizerNaming:
        """Return the naming for a parameter that `saved` has written, where this optimizer has several rules."""
        family = saved.family
        return self.of_family(family.name) if family is not None and family in self.families else self

    def check_reads(self, saved: OptimizerNaming, what: str = "the optimizer state") -> None:
        """Raise CheckpointError if what `saved` has written means nothing to this optimizer; `what` names it."""
        if not self.reads(saved):
            raise CheckpointError(
                f"{what} was saved by {saved} ({saved.dialect}), and {self} ({self.dialect}) cannot go on with it. "
                "Use the same kind of optimizer, or load the model alone."
            )

    def __str__(self) -> str:
        kind, family = _first(self.kinds), self.family
        is_told = family is None or (family.name in kind.lower() and " and " not in kind)
        return kind if is_told or family is None else f"the {family.name} of {kind}"

    def has_slot(self, neutral: str) -> bool:
        """Return whether the table knows the slot; it then has its parameter's shape."""
        return self._find(neutral=neutral) is not None

    @property
    def counts_steps(self) -> bool:
        """Return whether this optimizer's updates depend on how many there were before, as far as the table knows."""
        return self.family is not None and self.dialect in self.family.counts_steps

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

    def numbers(self, options: Mapping[str, object]) -> dict[str, float | None]:
        """Return the options by which units of slots may differ, by neutral names; None where one is not known.

        Args:
            options: of a parameter's group, in the names of this optimizer.
        """
        found = {neutral: _number(self.option(options, neutral)) for neutral in ("learning_rate", "momentum")}
        rate, ratio = found["learning_rate"], _number(self.option(options, "learning_rate_ratio"))
        return found if rate is None or ratio is None else {**found, "learning_rate": rate * ratio}

    def _find(self, *, native: str | None = None, neutral: str | None = None) -> StateSlot | None:
        for slot in self.family.slots if self.family is not None else ():
            if slot.neutral == neutral or (native is not None and slot.names.get(self.dialect) == native):
                return slot
        return None


def _families(dialect: str, kinds: Iterable[Collection[str]]) -> tuple[Family, ...]:
    """Return the families of the first of some classes that has any, each class given by its names."""
    for names in kinds:
        found = tuple(family for family in FAMILIES if not family.members.get(dialect, frozenset()).isdisjoint(names))
        if found:
            return found
    return ()


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _first(kinds: Iterable[str]) -> str:
    return next(iter(kinds), "an optimizer")
