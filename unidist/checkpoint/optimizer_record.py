"""The plain values of an optimizer in a checkpoint: kind, options of groups, and what it counts per parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unidist.checkpoint.slots import Speech
from unidist.checkpoint.state import Plain
from unidist.errors import CheckpointError

STEP = "step"
"""The scalar by which a parameter counts its updates; every optimizer that counts them has it under this name."""


@dataclass
class OptimizerRecord:
    """What of an optimizer is no tensor, as one rank knows it.

    Args:
        speech: its dialect and class.
        groups: options of each parameter group, by number ("0"), in the dialect's own names; plain values.
        group_of: number of its group, by path of the parameter.
        scalars: what is kept per parameter and is a number, by path: `STEP`, above all.
    """

    speech: Speech
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    group_of: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)

    def values(self) -> dict[str, Plain]:
        """Return it as `KeepsState.values` wants it."""
        return {
            "dialect": self.speech.dialect,
            "kinds": list(self.speech.kinds),
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
            speech = Speech(str(values["dialect"]), tuple(values["kinds"]))
            return cls(speech, dict(values["groups"]), dict(values["group_of"]), dict(values["scalars"]))
        except (KeyError, TypeError) as exc:
            raise CheckpointError(f"the section has no optimizer's values: {exc!r} is missing or malformed") from exc

    def learning_rate(self, path: str) -> float:
        """Return the learning rate of a parameter when it was saved; 0 where it is not known."""
        options = self.groups.get(self.group_of.get(path, "0"), {})
        rate = self.speech.option(options, "learning_rate")
        return float(rate) if isinstance(rate, int | float) else 0.0

    @property
    def steps(self) -> int:
        """The largest number of updates that any parameter has seen."""
        return int(max((scalars.get(STEP, 0) for scalars in self.scalars.values()), default=0))
