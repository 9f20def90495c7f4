"""Figures of a model, its optimizer and a batch, for estimates. Plain numbers, validated when they are created."""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from unidist.errors import ConfigurationError, unknown_choice

OPTIMIZER_STATES: dict[str, int] = {
    "sgd": 0,
    "momentum": 1,
    "adagrad": 1,
    "lion": 1,
    "muon": 1,
    "rmsprop": 1,
    "adadelta": 2,
    "adam": 2,
    "adamw": 2,
    "lamb": 2,
    "nadam": 2,
    "amsgrad": 3,
}
"""Elements of state that an optimizer keeps for each parameter."""

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class ParameterFigures:
    """One parameter.

    Args:
        count: number of elements.
        itemsize: bytes of one.
        trained: it gets a gradient.
    """

    count: int
    itemsize: int = 4
    trained: bool = True


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes that a forward pass keeps for the backward pass, for the batch of one rank.

    Args:
        blocks: of all blocks together.
        block_inputs: of the inputs of all blocks.
        largest_block: of the block that keeps most.
        outside: of everything outside of the blocks (embeddings, the head, the loss).
    """

    blocks: float
    block_inputs: float
    largest_block: float
    outside: float


class ActivationModel(ABC):
    """Says what a forward pass keeps, for any width of its elements."""

    @abstractmethod
    def bytes(self, itemsize: int) -> ActivationBytes:
        """Return what is kept when most activations have elements of `itemsize` bytes."""


@dataclass(frozen=True)
class MeasuredActivations(ActivationModel):
    """Measured memory that a forward pass keeps.

    Args:
        kept: bytes, if most elements have `itemsize` bytes. For another width all of it is scaled.
        itemsize: see `kept`.
    """

    kept: ActivationBytes
    itemsize: int

    @override
    def bytes(self, itemsize: int) -> ActivationBytes:
        factor = itemsize / self.itemsize
        kept = self.kept
        return ActivationBytes(
            kept.blocks * factor, kept.block_inputs * factor, kept.largest_block * factor, kept.outside * factor
        )


@dataclass(frozen=True)
class ModelFigures:
    """A model.

    Args:
        parameters: number of its parameters, above 0.
        trained: how many of them get a gradient; default: all.
        largest_unit: parameters of the largest block, that stage 3 of ZeRO gathers at once; None if not known.
        parameter_bytes: bytes of one parameter as the model has them; None: as the precision says.
        outside: how many of the parameters belong to no block, such as an embedding; None if not known.
        experts: how many of them belong to experts, that an axis of experts divides.
    """

    parameters: int
    trained: int | None = None
    largest_unit: int | None = None
    parameter_bytes: float | None = None
    outside: int | None = None
    experts: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 <= self.experts <= self.parameters:
            raise ConfigurationError(f"{self.experts} of {self.parameters} parameters cannot be those of experts")
        if self.parameters < 1:
            raise ConfigurationError(f"a model with {self.parameters} parameters: give at least 1")
        if self.trained is not None and not 0 <= self.trained <= self.parameters:
            raise ConfigurationError(f"{self.trained} of {self.parameters} parameters cannot be trained")

    @property
    def num_trained(self) -> int:
        """Parameters that get a gradient."""
        return self.parameters if self.trained is None else self.trained

    @classmethod
    def of(cls, parameters: Mapping[str, ParameterFigures]) -> ModelFigures:
        """Return the figures of a model whose parameters are known one by one, by path.

        A unit is what stands under the first number in the paths (`blocks.3.mlp.weight`: unit `blocks.3`), or
        under the module that has the parameter where there is no number. What all paths begin with does not count.
        """
        if not parameters:
            raise ConfigurationError("the model has no parameters: there is nothing to estimate")
        units: dict[str, int] = {}
        modules = zip(*(_PARTS.findall(path)[:-1] for path in parameters), strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda parts: len(set(parts)) == 1, modules))
        for path, item in parameters.items():
            unit = unit_of("".join(_PARTS.findall(path)[shared:]))
            units[unit] = units.get(unit, 0) + item.count
        count = sum(item.count for item in parameters.values())
        return cls(
            parameters=count,
            trained=sum(item.count for item in parameters.values() if item.trained),
            largest_unit=max(units.values()),
            parameter_bytes=sum(item.count * item.itemsize for item in parameters.values()) / max(count, 1),
        )


_PARTS = re.compile(r"[^./]+[./]?")
_NUMBERED = re.compile(r"^(.*?[./_]\d+)(?:[./]|$)")


def unit_of(path: str) -> str:
    """Return the unit that a parameter belongs to: `blocks.3.mlp.weight` -> `blocks.3`, `head.weight` -> `head`."""
    found = _NUMBERED.match(path)
    return found[1] if found else re.sub(r"[./][^./]*$", "", path)


@dataclass(frozen=True)
class Workload:
    """Everything but the strategies.

    Args:
        model: its figures.
        optimizer: a name in `OPTIMIZER_STATES`.
        precision: "fp32", or "bf16" and "fp16": 16-bit weights, gradients and activations, with master copies in
            float32. None: the model's own type, else float32.
        activations: what the batch of one rank keeps; None: not known.
    """

    model: ModelFigures
    optimizer: str = "adam"
    precision: Precision | None = None
    activations: ActivationModel | None = None

    def __post_init__(self) -> None:
        """Check the names."""
        if self.optimizer not in OPTIMIZER_STATES:
            raise unknown_choice("optimizer", self.optimizer, OPTIMIZER_STATES)
        if self.precision not in (None, "fp32", "bf16", "fp16"):
            raise unknown_choice("precision", str(self.precision), ("fp32", "bf16", "fp16"))

    @property
    def states_each(self) -> int:
        """Elements of optimizer state for each parameter."""
        return OPTIMIZER_STATES[self.optimizer]
