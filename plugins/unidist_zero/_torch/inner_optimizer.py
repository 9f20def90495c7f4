"""An optimizer of the script's own class that steps on flat segments; the script's own object holds the options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from unidist_torch.optimizer.clone import clone_for, options_of
from unidist_torch.optimizer.narrow_step import NarrowStep, SteppedTensor
from unidist_torch.parameter_states import ParameterState, ParameterStates
from unidist_zero._torch.parameters.offload import StateMemory
from unidist_zero._torch.segments import SegmentTensor


class InnerOptimizer:
    """Steps as the script's optimizer would.

    Options of the parameter groups, learning rates above all, are copied from the script's optimizer before each step,
    and changes that the step makes to them are copied back.

    Args:
        outer: the script's optimizer.
        plain: its class before it was bound.
        memory: where the state is kept; None: beside the parameters.
        narrow: steps where parameters and state are kept in 16 bits; None: the class does.
    """

    def __init__(
        self,
        outer: torch.optim.Optimizer,
        plain: type[torch.optim.Optimizer],
        memory: StateMemory | None = None,
        narrow: NarrowStep | None = None,
    ) -> None:
        self._outer = outer
        self._plain = plain
        self._memory = memory
        self._narrow = narrow
        self._segments: list[SegmentTensor] = []
        self._inner = clone_for(outer, plain, [[] for _ in outer.param_groups])
        self._states = ParameterStates(self._inner)

    def set_segments(self, segments: Iterable[SegmentTensor]) -> None:
        """Step on these segments from now on."""
        self._segments = list(segments)
        groups = self._inner.param_groups
        for group in self._outer.param_groups[len(groups) :]:
            groups.append({**options_of(group), "params": []})
        for group in groups:
            group["params"] = []
        for segment in self._segments:
            groups[segment.group]["params"].append(segment.leaf)

    def state(self, segment: SegmentTensor) -> ParameterState:
        """Return the state of a segment; empty before its first update."""
        return self._states.of(segment.leaf)

    def set_state(self, segment: SegmentTensor, state: ParameterState) -> None:
        """Replace the state of a segment."""
        self._states.replace(segment.leaf, state)
        self._keep_in_memory(segment)

    def pop_state(self, segment: SegmentTensor) -> ParameterState:
        """Remove the state of a segment, and return it."""
        return self._states.take(segment.leaf)

    def before_step(self) -> None:
        """Run the script's hooks before a step; they may read the parameters, and write to them."""
        for hook in list(self._outer._optimizer_step_pre_hooks.values()):
            hook(self._outer, (), {})

    def step(self, tensors: Iterable[SteppedTensor], number: int) -> Any:
        """Update every segment that has a gradient; returns what the optimizer's class returns.

        Args:
            tensors: the leaves of the segments.
            number: of the update.
        """
        outer, inner = self._outer, self._inner
        for group, options in zip(inner.param_groups, outer.param_groups, strict=True):
            group.update(options_of(options))
        memory = self._memory
        if self._narrow is not None:
            result = self._narrow.step(inner, tensors, number)
        elif memory is None:
            result = self._plain.step(inner)
        else:
            fused = _fuse(inner.param_groups)
            with memory.making_state(segment.leaf for segment in self._segments):
                result = self._plain.step(inner)
            for group in fused:
                group["fused"] = None  # as the script's optimizer has it
        for segment in self._segments:
            self._keep_in_memory(segment)
        for group, options in zip(inner.param_groups, outer.param_groups, strict=True):
            options.update(options_of(group))
        return result

    def after_step(self) -> None:
        """Run the script's hooks after a step: the parameters are up to date."""
        for hook in list(self._outer._optimizer_step_post_hooks.values()):
            hook(self._outer, (), {})

    def _keep_in_memory(self, segment: SegmentTensor) -> None:
        """Move a segment's state to the memory in which it is kept."""
        if self._memory is None:
            return
        state = self.state(segment)
        for name, value in state.items():
            if segment.is_slot(value):
                state[name] = self._memory.moved(value)
            elif isinstance(value, torch.Tensor):
                state[name] = value.to(segment.leaf.device)


def _fuse(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let groups step in one pass over memory; returns those for which the script has left that open.

    In host memory torch steps on one tensor after the other, and passes over each ten times, unless it is asked.
    """
    chosen = [
        group
        for group in groups
        if group.get("fused", False) is None
        and group.get("foreach") is None
        and not group.get("differentiable")
        and all(leaf.is_floating_point() for leaf in group["params"])
    ]
    for group in chosen:
        group["fused"] = True
    return chosen
