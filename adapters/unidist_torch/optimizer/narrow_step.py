"""Steps of an optimizer, computed in float32, on parameters and state that are kept in bfloat16.

What an optimizer updates in bfloat16 itself stands still as soon as the updates are smaller than half the distance to
the neighbouring number, 1/256 of the value. Here a copy of a few tensors at a time is updated in float32, and rounded
when it goes back, with random numbers in place of "to the nearest", if that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from unidist.errors import UsageError
from unidist.gradients.precision import Precision, Rounding
from unidist.optim.rounding_key import RoundingKey
from unidist_torch.optimizer.clone import clone_for, options_of
from unidist_torch.optimizer.stochastic_rounding import round_stochastically
from unidist_torch.parameter_states import ParameterState, ParameterStates, is_slot

__all__ = ["ElementRange", "NarrowStep", "SteppedTensor"]

_PART_ELEMENTS = 1 << 22
"""So many elements are in float32 at a time, or one tensor that has more."""


class ElementRange(NamedTuple):
    """Elements of a parameter in a tensor that an optimizer steps on.

    Attributes:
        parameter: number of the parameter; the same on every rank, for every number of ranks.
        start: the first of them in the parameter.
        begin: the first of them in the tensor.
        num_elements: number of elements.
    """

    parameter: int
    start: int
    begin: int
    num_elements: int


@dataclass(frozen=True)
class SteppedTensor:
    """A tensor that an optimizer steps on.

    Args:
        leaf: the tensor, in one of the optimizer's groups.
        group: number of the group.
        ranges: what of which parameters its elements are. There may be gaps between them, for alignment.
    """

    leaf: torch.Tensor
    group: int
    ranges: Sequence[ElementRange]


class NarrowStep:
    """Steps as an optimizer would, with more digits than it keeps.

    Args:
        plain: the optimizer's class before it was bound.
        rounding: of what it has updated.
    """

    def __init__(self, plain: type[torch.optim.Optimizer], rounding: Rounding) -> None:
        self._plain = plain
        self._stochastic = rounding is Rounding.STOCHASTIC
        self._wide: Any = None

    @classmethod
    def wanted(cls, precision: Precision | None, plain: type[torch.optim.Optimizer]) -> NarrowStep | None:
        """Return what steps in a run of this precision; None: the optimizer's own class."""
        return None if precision is None or precision.rounding is None else cls(plain, precision.rounding)

    def step(self, optimizer: torch.optim.Optimizer, tensors: Iterable[SteppedTensor], number: int) -> Any:
        """Update the tensors that have a gradient, and their state in `optimizer`.

        Args:
            optimizer: of the class `plain`, or bound: its own step is not called.
            tensors: of its groups.
            number: of the update; random numbers depend on it.

        Returns:
            What the step of `plain` returned.

        Raises:
            UsageError: the optimizer counts steps in its groups, and would count each part as one.
        """
        if self._wide is None:
            self._wide = clone_for(optimizer, self._plain, [[] for _ in optimizer.param_groups])
        options = [options_of(group) for group in optimizer.param_groups]
        result, states = None, ParameterStates(optimizer)
        for part in _parts(tensor for tensor in tensors if tensor.leaf.grad is not None):
            before = self._use_options(options)
            copies = [(tensor, self._widened(tensor, states.of(tensor.leaf))) for tensor in part]
            result = self._plain.step(self._wide)
            for tensor, copy in copies:
                self._take_back(tensor, copy, states, number)
            if [options_of(group) for group in self._wide.param_groups] != before:
                raise UsageError(
                    f"{self._plain.__name__} keeps numbers of its steps in its parameter groups, and precision with "
                    "states=bf16 steps on a few tensors at a time: it would count each time. Leave states=bf16 out"
                )
        return result

    def _use_options(self, options: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        groups = self._wide.param_groups
        groups += [{} for _ in options[len(groups) :]]
        for group, given in zip(groups, options, strict=True):
            group.clear()
            group.update(given, params=[])
        return [dict(given) for given in options]

    def _widened(self, tensor: SteppedTensor, state: ParameterState) -> torch.Tensor:
        """Return the float32 copy on which the optimizer steps, with gradient and state; or the leaf itself."""
        leaf = tensor.leaf
        wide = leaf.detach()
        if leaf.dtype is torch.bfloat16:
            wide = wide.float()
        wide.requires_grad_().grad = leaf.grad if leaf.grad is None else leaf.grad.to(wide.dtype)
        self._wide.param_groups[tensor.group]["params"].append(wide)
        if state:
            self._wide.state[wide] = {
                name: value.to(wide.dtype) if _is_kept_narrow(name, value, leaf) else value
                for name, value in state.items()
            }
        return wide

    def _take_back(self, tensor: SteppedTensor, wide: torch.Tensor, states: ParameterStates, number: int) -> None:
        """Round what the optimizer has made of a copy."""
        leaf, kept = tensor.leaf, states.of(tensor.leaf)
        made: ParameterState = self._wide.state.pop(wide, {})
        wide.grad = None
        if leaf.dtype is torch.bfloat16:
            self._round(tensor, wide.detach(), leaf.detach(), number, "")
            for name, value in made.items():
                if is_slot(name, value, wide) and value.dtype is torch.float32 and value.shape == leaf.shape:
                    target = kept.get(name)
                    if target is None:
                        target = torch.zeros_like(value, dtype=leaf.dtype)
                    self._round(tensor, value, target, number, name)
                    made[name] = target
        states.replace(leaf, made)

    def _round(self, tensor: SteppedTensor, wide: torch.Tensor, target: torch.Tensor, number: int, name: str) -> None:
        if not self._stochastic:
            target.copy_(wide)
            return
        flat = wide.reshape(-1)
        rounded = target.view(-1) if target.is_contiguous() else torch.zeros_like(flat, dtype=target.dtype)
        for parameter, start, begin, count in tensor.ranges:
            key = RoundingKey.of(parameter, number, name)
            round_stochastically(flat[begin : begin + count], rounded[begin : begin + count], key, start)
        if not target.is_contiguous():
            target.copy_(rounded.view(target.shape))


def _is_kept_narrow(name: str, value: Any, leaf: torch.Tensor) -> bool:
    return leaf.dtype is torch.bfloat16 and is_slot(name, value, leaf) and value.dtype is torch.bfloat16


def _parts(tensors: Iterable[SteppedTensor]) -> Iterator[list[SteppedTensor]]:
    """Yield the tensors in parts of a limited size."""
    part: list[SteppedTensor] = []
    num_elements = 0
    for tensor in tensors:
        if part and num_elements + tensor.leaf.numel() > _PART_ELEMENTS:
            yield part
            part, num_elements = [], 0
        part.append(tensor)
        num_elements += tensor.leaf.numel()
    if part:
        yield part
