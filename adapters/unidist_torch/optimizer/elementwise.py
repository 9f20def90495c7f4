"""Detection of element-wise optimizers, by trying them on small tensors.

Strategies that shard parameters need to know: an element-wise optimizer (SGD, Adam) may step on any part of a tensor by
itself, one that looks at a tensor's form (Muon, Adafactor) only on the whole of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from unidist.errors import UsageError
from unidist_torch.optimizer.clone import clone_for
from unidist_torch.parameter_states import ParameterStates

_STEPS = 3  # of which the second and third use the state that the first has made
_DTYPE = torch.float64


def needs_whole_tensors(optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer] | None = None) -> bool:
    """Return whether an optimizer needs each parameter as a whole; False: it treats each element by itself.

    A copy of it, without state, steps on small tensors and on their halves. Costs some milliseconds.

    Args:
        optimizer: any; it is not changed.
        plain: its class before it was bound; default: its class.

    Raises:
        UsageError: it looks at several parameters at once (LBFGS), so no part of it can be updated by itself.
    """
    plain = plain or type(optimizer)
    if needs_closure(plain):
        raise UsageError(
            f"{plain.__name__}.step() asks for a closure, which it calls more than once and whose gradients it looks "
            "at all together; it cannot update a shard of the parameters. Use another optimizer, or the strategy 'data'"
        )
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for number in range(len(optimizer.param_groups)):
            apart, together, halves = _Trial(optimizer, plain, number).outcomes()
            if not _alike(apart, together):
                raise UsageError(
                    f"{plain.__name__} updates a parameter differently when there are others beside it; it cannot "
                    "update a shard of the parameters. Use another optimizer, or the strategy 'data'"
                )
            if halves is None or not _alike(apart, halves):
                return True
    return False


def needs_closure(plain: type[torch.optim.Optimizer]) -> bool:
    """Return whether the step of an optimizer's class cannot be called without a closure (LBFGS)."""
    closure = inspect.signature(plain.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class _Trial:
    """Small tensors and gradients, stepped by optimizers with the options of one group.

    Args:
        optimizer: whose options.
        plain: its class.
        number: of the group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer], number: int) -> None:
        self._optimizer = optimizer
        self._plain = plain
        self._number = number
        self._with_state = False
        generator = torch.Generator().manual_seed(number)
        self._data = [
            [torch.randn(shape, generator=generator, dtype=_DTYPE) for _ in range(1 + _STEPS)]
            for shape in ((4, 6), (5, 4))
        ]

    def outcomes(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor] | None]:
        """Return the tensors after steps in separate optimizers, in one together, and cut in halves.

        None for halves where the optimizer refuses flat tensors.
        """
        try:
            apart, together = self._whole()
        except Exception:  # some make their state in the constructor, which no step then looks for (Adagrad: KeyError)
            self._with_state = True
            try:
                apart, together = self._whole()
            except Exception as exc:
                raise UsageError(
                    f"{self._plain.__name__} could not be tried on a small tensor, to see whether it may update shards "
                    f"of parameters: {exc}. Use an optimizer for dense gradients, or the strategy 'data'"
                ) from exc
        try:
            halves = [tensor for each in self._data for tensor in self._stepped([each], cut=True)]
        except Exception:  # whatever an optimizer raises for a flat tensor (Muon: ValueError)
            return apart, together, None
        return apart, together, halves

    def _whole(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        apart = [tensor for each in self._data for tensor in self._stepped([each], cut=False)]
        return apart, self._stepped(self._data, cut=False)

    def _stepped(self, data: Sequence[Sequence[torch.Tensor]], *, cut: bool) -> list[torch.Tensor]:
        """Return tensors of these values after steps with these gradients."""
        tensors = [values.clone() for values, *_ in data]
        leaves = [part.requires_grad_() for tensor in tensors for part in _parts(tensor, cut)]
        probe = self._probe(leaves)
        for step in range(_STEPS):
            parts = (part for _, *gradients in data for part in _parts(gradients[step], cut))
            for leaf, part in zip(leaves, parts, strict=True):
                leaf.grad = part.clone()
            torch.manual_seed(0)  # an optimizer that adds noise
            probe.step()
        return tensors

    def _probe(self, leaves: list[torch.Tensor]) -> Any:
        groups = self._optimizer.param_groups
        probe = clone_for(
            self._optimizer, self._plain, [leaves if i == self._number else [] for i in range(len(groups))]
        )
        _make_harmless(probe)
        states = ParameterStates(self._optimizer)
        first = next((p for p in groups[self._number]["params"] if states.of(p)), None)
        if first is not None and self._with_state:
            for leaf in leaves:
                state = {name: _like(value, first, leaf) for name, value in states.of(first).items()}
                ParameterStates(probe).replace(leaf, state)
        return probe


def _like(value: Any, parameter: torch.Tensor, leaf: torch.Tensor) -> Any:
    """Return state of `parameter` for a probe's tensor: equal for all elements, if it has one for each."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape or not value.numel():
        return value.detach().cpu().clone()
    return torch.full_like(leaf, float(value.detach().reshape(-1)[0]), requires_grad=False)


def _parts(tensor: torch.Tensor, cut: bool) -> list[torch.Tensor]:
    if not cut:
        return [tensor.detach()]
    flat = tensor.detach().view(-1)
    middle = flat.numel() // 2 - 1
    return [flat[:middle], flat[middle:]]


def _make_harmless(probe: Any) -> None:
    """Drop options about devices and kernels: the probe's tensors are small and in host memory.

    A learning rate of 0, with which a schedule may begin, would make all optimizers the same.
    """
    for group in probe.param_groups:
        if "lr" in group and float(group["lr"]) == 0.0:
            group["lr"] = 0.01
        for name in ("capturable", "fused", "foreach"):
            if group.get(name):
                group[name] = False
        for name, value in group.items():
            if isinstance(value, torch.Tensor):
                group[name] = value.detach().cpu().clone()


def _alike(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-9, atol=1e-12) for one, other in zip(found, expected, strict=True))
