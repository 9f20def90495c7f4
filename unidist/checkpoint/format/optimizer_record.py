"""The plain values of an optimizer in a checkpoint: its kind, the options of groups, and counters per parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unidist.checkpoint.format.interface import Plain, SavedSection
from unidist.checkpoint.format.pieces import Placement, TensorInfo, split_slot
from unidist.checkpoint.format.slots import OptimizerNaming
from unidist.errors import CheckpointError

STEP = "step"
"""The scalar by which a parameter counts its updates; every optimizer that counts them has it under this name."""


@dataclass
class OptimizerRecord:
    """The part of an optimizer's state that is not tensors, as known on one rank.

    Args:
        naming: its dialect and class.
        groups: options of each parameter group, by number ("0"), in the dialect's own names; plain values.
        group_of: number of its group, by path of the parameter.
        scalars: state that is a number per parameter, by path: mainly `STEP`.
        families: names of the families of parameters for which `naming` does not tell, by path.
    """

    naming: OptimizerNaming
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)

    def add_family(self, path: str, naming: OptimizerNaming) -> None:
        """Record the family of a parameter, which has this naming, where the optimizer's names do not tell it."""
        told = OptimizerNaming(self.naming.dialect, self.naming.kinds).family
        if naming.family is not None and naming.family is not told:
            self.families[path] = naming.family.name

    def naming_of(self, path: str) -> OptimizerNaming:
        """Return the naming of the slots of a parameter."""
        return self.naming.of_family(self.families[path]) if path in self.families else self.naming

    def values(self) -> dict[str, Plain]:
        """Return it as `KeepsState.values` wants it."""
        found: dict[str, Plain] = {
            "dialect": self.naming.dialect,
            "kinds": list(self.naming.kinds),
            "groups": self.groups,
            "group_of": self.group_of,
            "scalars": self.scalars,
        }
        return {**found, "families": self.families} if self.families else found

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> OptimizerRecord:
        """Return what `values` was made of.

        Raises:
            CheckpointError: it is not an optimizer's.
        """
        try:
            naming = OptimizerNaming(str(values["dialect"]), tuple(values["kinds"]))
            groups, group_of, scalars = (dict(values[name]) for name in ("groups", "group_of", "scalars"))
            return cls(naming, groups, group_of, scalars, dict(values.get("families", {})))
        except (KeyError, TypeError) as exc:
            raise CheckpointError(f"the section has no optimizer's values: {exc!r} is missing or malformed") from exc

    @classmethod
    def check(
        cls,
        section: SavedSection,
        naming: OptimizerNaming,
        placements: Mapping[str, Placement],
        *,
        strict: bool,
        naming_of: Callable[[str], OptimizerNaming | None] | None = None,
    ) -> OptimizerRecord:
        """Return the record of a saved optimizer, if one of this kind and with these parameters can load it.

        Args:
            section: the optimizer's.
            naming: of the optimizer that loads.
            placements: of its parameters on this rank, by path.
            strict: a parameter that only one side has is an error; else what both have is loaded.
            naming_of: returns the naming of a parameter, where that is not the optimizer's; None if it has no state.

        Raises:
            CheckpointError: another kind of optimizer, other parameters, other shapes.
        """
        record = cls.of(section.values)
        wanted = []
        readers = {}
        for path in placements:
            saved, own = record.naming_of(path), naming if naming_of is None else naming_of(path)
            if own is None or path not in record.group_of:
                continue
            if saved.family is not None or not naming.reads(record.naming):
                own.check_reads(saved, f"the optimizer state of {path!r}")
            readers[path] = own.reading(saved)
        for name, info in section.tensors.items():
            path, slot = split_slot(name)
            if path in placements:
                shape = placements[path].shape if path in readers and readers[path].has_slot(slot) else info.shape
                wanted.append(TensorInfo(name, shape, info.dtype))
        missing = [path for path in placements if path not in record.group_of]
        if missing and strict:
            raise CheckpointError(
                f"the optimizer state that was saved does not know {len(missing)} of the parameters that this "
                f"optimizer has: {', '.join(missing[:8])}. Build the model that was saved, or load with strict=False."
            )
        section.match(wanted, strict=strict)
        return record

    def slot_of(self, path: str, neutral: str, naming: OptimizerNaming) -> str:
        """Return the name under which the slot of a parameter was saved that `naming` knows by this neutral name."""
        return naming.native(neutral) if self.naming_of(path).family is None else neutral

    def learning_rate(self, path: str) -> float | None:
        """Return the learning rate of a parameter when it was saved; None where it is not known."""
        return self.options_of(path)["learning_rate"]

    def options_of(self, path: str) -> dict[str, float | None]:
        """Return the options of a parameter by which units of slots may differ; None where one is not known."""
        options = self.groups.get(self.group_of.get(path, "0"), {})
        return self.naming_of(path).numbers(options)

    @property
    def steps(self) -> int:
        """The largest number of updates that any parameter has seen."""
        return int(max((scalars.get(STEP, 0) for scalars in self.scalars.values()), default=0))
