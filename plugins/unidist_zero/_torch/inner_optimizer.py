"""An optimizer of the script's own class that steps on runs; the script's own stays the one that is configured."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch

from unidist_torch.optimizer.optimizer_clone import clone_for, options_of
from unidist_zero._torch.parameters.offload import StateMemory
from unidist_zero._torch.runs import RunTensor, State


class InnerOptimizer:
    """Steps as the script's optimizer would.

    Options of the parameter groups, learning rates above all, are taken from the script's optimizer before each step,
    and what a step changes in them is given back.

    Args:
        outer: the script's optimizer.
        plain: its class before it was bound.
        memory: where the state is kept; None: beside the parameters.
    """

    def __init__(
        self, outer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer], memory: StateMemory | None = None
    ) -> None:
        self._outer = outer
        self._plain = plain
        self._memory = memory
        self._runs: list[RunTensor] = []
        self._inner = clone_for(outer, plain, [[] for _ in outer.param_groups])

    def hold(self, runs: Iterable[RunTensor]) -> None:
        """Step on these runs from now on."""
        self._runs = list(runs)
        groups = self._inner.param_groups
        for group in self._outer.param_groups[len(groups) :]:
            groups.append({**options_of(group), "params": []})
        for group in groups:
            group["params"] = []
        for run in self._runs:
            groups[run.group]["params"].append(run.leaf)

    def state(self, run: RunTensor) -> State:
        """Return the state of a run; empty before its first update."""
        found: State = self._inner.state.get(run.leaf, {})
        return found

    def set_state(self, run: RunTensor, state: State) -> None:
        """Replace the state of a run."""
        if state:
            self._inner.state[run.leaf] = state
            self._keep_in_memory(run)
        else:
            self._inner.state.pop(run.leaf, None)

    def forget(self, run: RunTensor) -> State:
        """Take the state of a run away, and return it."""
        found: State = self._inner.state.pop(run.leaf, {})
        return found

    def before_step(self) -> None:
        """Call what the script has registered for before a step; it may look at the parameters, and write to them."""
        for hook in list(self._outer._optimizer_step_pre_hooks.values()):
            hook(self._outer, (), {})

    def step(self) -> Any:
        """Update every run that has a gradient; returns what the optimizer's class returns."""
        outer, inner = self._outer, self._inner
        for group, options in zip(inner.param_groups, outer.param_groups, strict=True):
            group.update(options_of(options))
        memory = self._memory
        with nullcontext() if memory is None else memory.making_state(run.leaf for run in self._runs):
            result = self._plain.step(inner)
        for run in self._runs:
            self._keep_in_memory(run)
        for group, options in zip(inner.param_groups, outer.param_groups, strict=True):
            options.update(options_of(group))
        return result

    def after_step(self) -> None:
        """Call what the script has registered for after a step: the parameters are there."""
        for hook in list(self._outer._optimizer_step_post_hooks.values()):
            hook(self._outer, (), {})

    def _keep_in_memory(self, run: RunTensor) -> None:
        """Move a run's state to where it is to be kept."""
        if self._memory is None:
            return
        state = self.state(run)
        for name, value in state.items():
            if run.is_slot(value):
                state[name] = self._memory.moved(value)
            elif isinstance(value, torch.Tensor):
                state[name] = value.to(run.leaf.device)
