"""The plain values of an optimizer in a checkpoint: its kind, the options of groups, and counters per parameter."""

from __future__ import annotations

from collections.abc import Mapping
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
    """

    naming: OptimizerNaming
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)

    def values(self) -> dict[str, Plain]:
        """Return it as `KeepsState.values` wants it."""
        return {
            "dialect": self.naming.dialect,
            "kinds": list(self.naming.kinds),
            "groups": self.groups,
            "group_of": self.group_of,
            "scalars": self.scalars,
        }

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> OptimizerRecord:
        """Return what `values` was made of.

        Raises:
            CheckpointError: it is not an optimizer's.
        """
        try:
            naming = OptimizerNaming(str(values["dialect"]), tuple(values["kinds"]))
            return cls(naming, dict(values["groups"]), dict(values["group_of"]), dict(values["scalars"]))
        except (KeyError, TypeError) as exc:
            raise CheckpointError(f"the section has no optimizer's values: {exc!r} is missing or malformed") from exc

    @classmethod
    def check(
        cls, section: SavedSection, naming: OptimizerNaming, placements: Mapping[str, Placement], *, strict: bool
    ) -> OptimizerRecord:
        """Return the record of a saved optimizer, if one of this kind and with these parameters can load it.

        Args:
            section: the optimizer's.
            naming: of the optimizer that loads.
            placements: of its parameters on this rank, by path.
            strict: a parameter that only one side has is an error; else what both have is loaded.

        Raises:
            CheckpointError: another kind of optimizer, other parameters, other shapes.
        """
        record = cls.of(section.values)
        naming.check_reads(record.naming)
        wanted = []
        for name, info in section.tensors.items():
            path, slot = split_slot(name)
            if path in placements:
                shape = placements[path].shape if naming.has_slot(slot) else info.shape
                wanted.append(TensorInfo(name, shape, info.dtype))
        missing = [path for path in placements if path not in record.group_of]
        if missing and strict:
            raise CheckpointError(
                f"the optimizer state that was saved does not know {len(missing)} of the parameters that this "
                f"optimizer has: {', '.join(missing[:8])}. Build the model that was saved, or load with strict=False."
            )
        section.match(wanted, strict=strict)
        return record

    def learning_rate(self, path: str) -> float | None:
        """Return the learning rate of a parameter when it was saved; None where it is not known."""
        options = self.groups.get(self.group_of.get(path, "0"), {})
        rate = self.naming.option(options, "learning_rate")
        return float(rate) if isinstance(rate, int | float) else None

    @property
    def steps(self) -> int:
        """The largest number of updates that any parameter has seen."""
        return int(max((scalars.get(STEP, 0) for scalars in self.scalars.values()), default=0))
