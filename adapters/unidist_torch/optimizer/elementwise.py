"""Detection of element-wise optimizers, by trying them on small tensors.

Strategies that shard parameters need to know: an element-wise optimizer (SGD, Adam) may step on any part of a tensor by
itself, one that looks at a tensor's form (Muon, Adafactor) only on the whole of it. The tensors of the trial have the
forms of the script's own, see `unidist.optim.trial`.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unidist.errors import UsageError
from unidist.optim.trial import late_steps, step_counters, trial_shapes, uneven_middle
from unidist_torch.composed import check_composed
from unidist_torch.optimizer.clone import clone_for
from unidist_torch.parameter_states import ParameterStates

_SCALES = (1e-3, 1.0, 1e3)
"""Of the gradients of three steps, of which the second and third use the state that the first has made. They rise, so
that each of them shows in the parameters."""

_DTYPE = torch.float64


def needs_whole_tensors(optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer] | None = None) -> bool:
    """Return whether an optimizer needs each parameter as a whole; see `groups_of_whole_tensors`."""
    return any(groups_of_whole_tensors(optimizer, plain))


def groups_of_whole_tensors(
    optimizer: torch.optim.Optimizer,
    plain: type[torch.optim.Optimizer] | None = None,
    shapes: Mapping[int, Sequence[int]] | None = None,
) -> list[bool]:
    """Return for each group whether it needs its parameters as a whole; False: it treats each element by itself.

    A copy of it, without state, steps on small tensors and on their halves. Costs some milliseconds. An optimizer that
    is not shown to be element-wise gets whole tensors, which are right for any.

    Args:
        optimizer: any; it is not changed.
        plain: its class before it was bound; default: its class.
        shapes: of the whole parameters of which this rank has a part, by the identity of that.

    Raises:
        UsageError: it looks at several parameters at once (LBFGS), so no part of it can be updated by itself; or it
            cannot be tried.
    """
    plain = plain or type(optimizer)
    if needs_closure(plain):
        raise UsageError(
            f"{plain.__name__}.step() asks for a closure, which it calls more than once and whose gradients it looks "
            "at all together; it cannot update a shard of the parameters. Use another optimizer, or the strategy 'data'"
        )
    check_composed(optimizer)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _one_thread():
        trials = [_Trial(optimizer, plain, number, shapes or {}) for number in range(len(optimizer.param_groups))]
        whole = [trial.needs_whole() for trial in trials]  # of all: each may refuse
    if not any(trial.has_moved for trial in trials):
        raise UsageError(
            f"{plain.__name__}.step() did not change the tensors of its param_groups when it was tried, to see whether "
            "it may update shards of parameters. Let it step on the tensors that param_groups has at the time, or use "
            "the strategy 'data'"
        )
    return whole


def needs_closure(plain: type[torch.optim.Optimizer]) -> bool:
    """Return whether the step of an optimizer's class cannot be called without a closure (LBFGS)."""
    closure = inspect.signature(plain.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: for small tensors the ranks of a host would wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Trial:
    """Small tensors and gradients, stepped by optimizers with the options of one group.

    Args:
        optimizer: whose options.
        plain: its class.
        number: of the group.
        shapes: see `groups_of_whole_tensors`.

    Attributes:
        has_moved: the steps have changed the tensors.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain: type[torch.optim.Optimizer],
        number: int,
        shapes: Mapping[int, Sequence[int]],
    ) -> None:
        self._optimizer = optimizer
        self._plain = plain
        self._number = number
        self._with_state = False
        generator = torch.Generator().manual_seed(number)
        parameters = optimizer.param_groups[number]["params"]
        self._data = [
            [scale * torch.randn(form, generator=generator, dtype=_DTYPE) for scale in (1.0, *_SCALES)]
            for form in trial_shapes(shapes.get(id(each), each.shape) for each in parameters)
            for _ in range(2)
        ]
        self.has_moved = False

    def needs_whole(self) -> bool:
        """Compare steps of separate optimizers, of one for all, and on halves; see `groups_of_whole_tensors`."""
        apart, together = self._whole_runs()
        halves = [self._run([each], cut=True) for each in self._data]
        is_whole = False
        for late in (None, *late_steps(_options(self._optimizer, self._plain, self._number))):
            if late is not None and not (_advanced([*apart, together], late) and _finite(apart)):
                return True
            if not _alike([together], apart):
                raise UsageError(
                    f"{self._plain.__name__} updates a parameter differently when there are others beside it; it "
                    "cannot update a shard of the parameters. Use another optimizer, or the strategy 'data'"
                )
            together.check_composed()
            is_whole = is_whole or not _advanced(halves, late) or not _alike(halves, apart)
        self.has_moved = not _equal([run.tensors[0] for run in apart], [values for values, *_ in self._data])
        return is_whole or not self.has_moved

    def _whole_runs(self) -> tuple[list[_Run], _Run]:
        """Return runs on whole tensors after the first steps, of each by itself and of all."""
        try:
            return self._tried()
        except Exception:  # some make their state in the constructor, which no step then looks for (Adagrad: KeyError)
            self._with_state = True
        try:
            return self._tried()
        except Exception as exc:
            raise UsageError(
                f"{self._plain.__name__} could not be tried on a small tensor, to see whether it may update shards "
                f"of parameters: {exc}. Use an optimizer for dense gradients, or the strategy 'data'"
            ) from exc

    def _tried(self) -> tuple[list[_Run], _Run]:
        apart, together = [self._run([each], cut=False) for each in self._data], self._run(self._data, cut=False)
        for run in (*apart, together):
            run.advance(None)
        return apart, together

    def _run(self, data: Sequence[Sequence[torch.Tensor]], *, cut: bool) -> _Run:
        groups = self._optimizer.param_groups
        run = _Run(data, cut=cut)
        probe = clone_for(
            self._optimizer, self._plain, [run.leaves if i == self._number else [] for i in range(len(groups))]
        )
        _make_harmless(probe)
        states = ParameterStates(self._optimizer)
        first = next((p for p in groups[self._number]["params"] if states.of(p)), None)
        if first is not None and self._with_state:
            for leaf in run.leaves:
                state = {name: _like(value, first, leaf) for name, value in states.of(first).items()}
                ParameterStates(probe).replace(leaf, state)
        run.step_with(probe, probe.param_groups[self._number])
        return run


class _Run:
    """Tensors, and an optimizer that steps on them.

    Args:
        data: for each tensor its values, and its gradients in the steps.
        cut: the optimizer sees each as two flat parts.

    Attributes:
        tensors: as they are now.
        leaves: what the optimizer steps on: of the same memory.
    """

    def __init__(self, data: Sequence[Sequence[torch.Tensor]], *, cut: bool) -> None:
        self._data = data
        self._cut = cut
        self._counters: set[Hashable] = set()
        self.tensors = [values.clone() for values, *_ in data]
        self.leaves = [part.requires_grad_() for tensor in self.tensors for part in _parts(tensor, cut)]

    def step_with(self, probe: Any, group: dict[str, Any]) -> None:
        """Step with this optimizer from now on.

        Args:
            probe: over the leaves.
            group: the one of its groups that has them.
        """
        self._probe = probe
        self._homes: list[dict[str, Any]] = [group, vars(probe)]

    def advance(self, late: int | None) -> None:
        """Make a step for each gradient.

        Args:
            late: let the optimizer believe that it has made so many steps before; nothing is done if it counts none.
        """
        if late is not None and not self._counters:
            return
        if late is not None:
            self._believe(late)
        records: list[dict[Hashable, float]] = []
        for gradients in zip(*(each for _, *each in self._data), strict=True):
            parts = (part for gradient in gradients for part in _parts(gradient, self._cut))
            for leaf, part in zip(self.leaves, parts, strict=True):
                leaf.grad = part.clone()
            torch.default_generator.manual_seed(0)  # an optimizer that adds noise
            self._probe.step()
            records.append(dict(self._numbers()))
        self._counters |= step_counters(records)

    def check_composed(self) -> None:
        """Raise UsageError if the optimizer holds others, and keeps state beside theirs."""
        check_composed(self._probe)

    def _kept(self) -> Iterator[dict[str, Any]]:
        """Yield where the optimizer keeps numbers."""
        yield from self._homes
        states = ParameterStates(self._probe)
        yield from (states.of(leaf) for leaf in self.leaves)

    def _numbers(self) -> Iterator[tuple[Hashable, float]]:
        for place, kept in enumerate(self._kept()):
            for name, value in kept.items():
                if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                    yield (place, name), float(value)

    def _believe(self, steps: int) -> None:
        for place, kept in enumerate(self._kept()):
            for name, value in kept.items():
                if (place, name) in self._counters:
                    kept[name] = (
                        torch.full_like(value, steps) if isinstance(value, torch.Tensor) else type(value)(steps)
                    )


def _advanced(runs: Sequence[_Run], late: int | None) -> bool:
    """Advance runs; returns whether the optimizer can do it."""
    try:
        for run in runs:
            run.advance(late)
    except Exception:  # whatever an optimizer raises for a flat tensor (Muon: ValueError), or in later steps
        return False
    return True


def _options(optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer], number: int) -> Iterator[Any]:
    """Yield the options of one group: its entries, and what was given to the constructor and is an attribute."""
    given = (vars(optimizer).get(name) for name in inspect.signature(plain.__init__).parameters)
    for option in (*optimizer.param_groups[number].values(), *given):
        yield from option if isinstance(option, list | tuple) else (option,)


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
    at = uneven_middle(flat.numel())
    return [part for part in (flat[:at], flat[at:]) if part.numel()]


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


def _alike(found: Sequence[_Run], expected: Sequence[_Run]) -> bool:
    pairs = zip(_tensors(found), _tensors(expected), strict=True)
    return all(
        torch.equal(one, other) or torch.allclose(one, other, rtol=1e-9, atol=1e-12)  # the first is faster
        for one, other in pairs
    )


def _finite(runs: Sequence[_Run]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(runs))


def _equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _tensors(runs: Sequence[_Run]) -> Iterator[torch.Tensor]:
    return (tensor for run in runs for tensor in run.tensors)
