"""`--verify` for PyTorch: the unchanged model is kept until the first batch, and both models compute the same of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from unidist.checkpoint.format.interface import kept_state, placements_of
from unidist.checkpoint.format.pieces import Piece, Placement
from unidist.errors import UsageError
from unidist.mesh import REPLICA_AXES
from unidist.optim.interface import StepRunner
from unidist.runtime import context
from unidist.strategy.interface import Plan
from unidist.verification import (
    MAX_COPIED_BYTES,
    FirstBatchCheck,
    Leaf,
    NotComparableError,
    first_batch_check,
    pending_check,
)
from unidist_torch.checkpoint.states import ModelState
from unidist_torch.checkpoint.tensors import piece_of
from unidist_torch.framework import TorchFramework
from unidist_torch.memory import dtype_of, is_transforming
from unidist_torch.models import plain_use
from unidist_torch.models.compiled_model import uncompiled, uncompiled_path
from unidist_torch.models.step_runner import LossFunction, call, evaluating
from unidist_torch.operations.functions import broadcast_parameters

if TYPE_CHECKING:
    from unidist.runtime.context import Context

_log = logging.getLogger("unidist")

_IGNORED = -100
"""The default `ignore_index` of PyTorch's losses."""
_NUM_SAMPLES = 2
"""Samples of the first batch that are computed twice, where the model need not have the whole batch."""


def pieces_of(model: torch.nn.Module) -> list[Piece]:
    """Return the pieces of the parameters that this rank holds; none of a model that cannot be saved in pieces."""
    state = kept_state(model) or ModelState(model)
    names = _parameter_names(model)
    try:
        return [piece for piece in state.pieces() if piece.tensor.name in names]
    except UsageError:
        return []


def rates_of(optimizer: torch.optim.Optimizer) -> Callable[[], tuple[float, ...]]:
    """Return a function that returns the learning rates of an optimizer's groups, without those on a device."""
    owner = weakref.ref(optimizer)

    def rates() -> tuple[float, ...]:
        bound = owner()
        found: list[Any] = [group.get("lr") for group in bound.param_groups] if bound is not None else []
        return tuple(float(each) for each in found if isinstance(each, float | int) or _is_number_in_host_memory(each))

    return rates


def _is_number_in_host_memory(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1


def trained_pieces(names: Mapping[torch.Tensor, str]) -> list[Piece]:
    """Return whole parameters, by their names, as pieces; without those that are not trained."""
    placed = [
        (Placement.whole(name, tuple(each.shape)), each)
        for each, name in names.items()
        if each.requires_grad and each.numel() and not each.is_meta
    ]
    return [piece_of(placement.tensor(dtype_of(each)), placement.part(), each) for placement, each in placed]


def _parameter_names(model: torch.nn.Module) -> set[str]:
    """Return the names in the whole model of the parameters; buffers may differ between ranks."""
    model = uncompiled(model)
    places = placements_of(model)
    return {
        uncompiled_path(places.placement(path, tuple(parameter.shape), dtype_of(parameter)).name)
        for path, parameter in model.named_parameters()
    }


def output_check(model: torch.nn.Module, runtime: Context, plan: Plan, *, deferred: bool) -> FirstBatchCheck | None:
    """Return the check of a model that a strategy is about to change; None if there is none to be made. Collective.

    Args:
        model: with rank 0's values after this call.
        runtime: whose ranks.
        plan: of the run.
        deferred: no rank ever holds the whole model, as its values are made where they are needed.
    """
    changes = any(strategy.changes_model for strategy in plan.strategies)
    if not changes or deferred or any(tensor.is_meta for tensor in model.parameters()):
        return None
    check = first_batch_check(runtime, plan, model)
    if check is None:
        return None
    if not plan.model_axes:  # the others have had rank 0's values already
        broadcast_parameters(TorchFramework().model_state(model), root_rank=0)
    if check.computes:
        check.reference = _copied(model)
    return check


def attach(check: FirstBatchCheck, model: torch.nn.Module, *, runs_steps: bool) -> None:
    """Compare at the first call of the distributed model in training, or in `before_step` if a strategy runs the steps.

    Args:
        check: made before the model was changed.
        model: the distributed one.
        runs_steps: a strategy of the plan has `RunsSteps`.
    """
    if runs_steps:
        check.attach(model, lambda: pieces_of(model))
        return

    check.watch(lambda: pieces_of(model))

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Within torch.func the next call outside of it is waited for.
        if module.training and torch.is_grad_enabled() and not is_transforming():
            is_changed = _attributes(model) != attributes
            handle.remove()
            _compare_call(check, module, args, kwargs, is_changed=is_changed)

    handle = model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)  # before parameters are gathered
    attributes = _attributes(model)


def before_step(
    model: torch.nn.Module, runner: Callable[[], StepRunner], loss_fn: LossFunction, inputs: Any, targets: Any
) -> None:
    """Compare outputs and loss of the first batch before a strategy's runner trains on it. Collective over all ranks.

    Args:
        model: the distributed one.
        runner: returns the runner of its steps.
        loss_fn: as the runner has it.
        inputs: of the batch.
        targets: of the batch.

    Raises:
        MismatchError: on every rank; names the output and both values.
    """
    check = pending_check(model)
    if check is None:
        return

    def expected(reference: torch.nn.Module) -> tuple[Any, Any]:
        with evaluating(reference), _random_states_kept(check.divided):
            outputs = call(reference, _like(reference, inputs))
            return outputs, loss_fn(outputs, _like(reference, targets))

    def found() -> tuple[Any, Any]:
        return _whole(runner().predict(inputs)), runner().evaluate(inputs, targets)

    with _random_states_kept():
        check.compare(expected, found, ("the output", "the loss"), _leaf)


@contextlib.contextmanager
def computed_again(model: torch.nn.Module) -> Iterator[None]:
    """Let passes within the block leave no trace: in random generators, in buffers of the model, in gradients."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with plain_use():
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        for parameter, _ in gradients:
            parameter.grad = None
    with _random_states_kept():
        try:
            yield
        finally:
            with torch.no_grad(), plain_use():
                for buffer, before in buffers:
                    buffer.copy_(before)
                for parameter, gradient in gradients:
                    parameter.grad = gradient


def warn_of_ignored(targets: Any, plan: Plan) -> None:
    """Warn on rank 0 if targets are ignored by PyTorch's losses, and means of them are averaged without a weight.

    Args:
        targets: of the first batch.
        plan: of the run.
    """
    runtime = context.current()
    averages = runtime.axis_size(REPLICA_AXES) > 1 or plan.gate is not None or plan.runs_steps is not None
    if not averages or runtime.topology.rank or not runtime.settings.verify.first:
        return
    for each in pytree.tree_leaves(targets):
        if isinstance(each, torch.Tensor) and each.dtype is torch.int64 and bool((each == _IGNORED).any()):
            _log.warning(
                "some targets are %d, which PyTorch's losses ignore, and means over the others are averaged over "
                "ranks, micro-batches and passes, as if each had as many of them. For the mean over all of them give "
                "TrainStep(..., weight=lambda y: (y != %d).sum()); --verify off leaves this line out",
                _IGNORED,
                _IGNORED,
            )
            return


def _compare_call(
    check: FirstBatchCheck, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_changed: bool
) -> None:
    args, kwargs = _first_samples((args, kwargs))

    def run(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if check.divided:  # its dropout draws other numbers, by design
            with evaluating(module):
                return _whole(module(*args, **kwargs))
        with torch.no_grad(), _random_states_kept():
            return _whole(module(*args, **kwargs))

    def expected(reference: torch.nn.Module) -> tuple[Any, ...]:
        if is_changed:
            raise NotComparableError("the script has changed it since it was distributed")
        _check_repeatable(reference)
        _copy_modes(model, reference)
        attributes = _attributes(reference)
        with _random_states_kept(check.divided):
            own_args, own_kwargs = _like(reference, (args, kwargs))
            outputs = run(reference, own_args, own_kwargs)
            if attributes != _attributes(reference):
                raise NotComparableError("its forward changes its attributes, so another pass would do harm")
            tensors = [each for each in pytree.tree_leaves(outputs) if isinstance(each, torch.Tensor)]
            if check.divided and sum(tensor.nbytes for tensor in tensors) > MAX_COPIED_BYTES:
                raise NotComparableError("they are too large to have whole on every rank")
            return (outputs,) if check.divided else (outputs, outputs)

    def found() -> tuple[Any, ...]:
        first = run(model, args, kwargs)
        # A strategy that gathers parameters when they are needed has had them there for the first pass.
        return (first,) if check.divided else (first, run(model, args, kwargs))

    names = ("the output",) if check.divided else ("the output", "the output of another pass")
    with computed_again(model):
        check.compare(expected, found, names, _leaf)


def _check_repeatable(model: torch.nn.Module) -> None:
    """Raise `NotComparableError` if another pass would do more than compute: the script's hooks, or compile again."""
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise NotComparableError("the script's hooks would see another pass")
        if uncompiled(module) is not module or module._compiled_call_impl is not None:
            raise NotComparableError("another pass would be compiled")


def _copy_modes(model: torch.nn.Module, reference: torch.nn.Module) -> None:
    """Set each module of the reference to train or evaluate as the model's module of this name does."""
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in reference.named_modules():
        module.training = modes.get(name, model.training)


def _attributes(model: torch.nn.Module) -> dict[str, Any]:
    """Return the plain attributes of all modules, and the sizes of others: what a script or a forward pass changes."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str | None) and name != "training":
                found[f"{path}.{name}"] = value
            elif isinstance(value, dict | list | set):
                found[f"{path}.{name}"] = len(value)
    return found


def _copied(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return a copy of the model, without values if they are too many; None if it cannot be copied."""
    memo: dict[int, Any] = {}
    tensors = [*model.parameters(), *model.buffers()]
    if sum(tensor.nbytes for tensor in tensors) > MAX_COPIED_BYTES:
        for tensor in tensors:
            memo[id(tensor)] = tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        _log.debug("--verify: %s cannot be copied: %s", type(model).__name__, error)
        return None


@contextlib.contextmanager
def _random_states_kept(must_not_draw: bool = False) -> Iterator[None]:
    """Restore the state of the generators at the end.

    Args:
        must_not_draw: what is run inside is compared with a divided model, which draws in another order.

    Raises:
        NotComparableError: numbers were drawn that must not be.
    """
    before = _RandomStates()
    try:
        yield
        if must_not_draw and before != _RandomStates():
            raise NotComparableError("it draws random numbers, which a divided model draws in another order")
    finally:
        before.restore()


class _RandomStates:
    """The state of the generators that a forward pass may draw from."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def __eq__(self, other: object) -> bool:
        """Return whether nothing was drawn in between."""
        assert isinstance(other, _RandomStates)
        same_cuda = all(torch.equal(*pair) for pair in zip(self._cuda or (), other._cuda or (), strict=False))
        return (
            self._python == other._python
            and all(np.array_equal(*pair) for pair in zip(self._numpy, other._numpy, strict=True))
            and torch.equal(self._torch, other._torch)
            and same_cuda
        )

    __hash__ = None  # type: ignore[assignment]  # it changes

    def restore(self) -> None:
        """Set them to what they were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)


def _first_samples(values: Any) -> Any:
    """Return the first samples of a batch, if all its tensors have as many rows; else the batch."""
    tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, torch.Tensor)]
    counts = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors}
    if len(counts) != 1 or next(iter(counts)) <= _NUM_SAMPLES:
        return values
    return pytree.tree_map(lambda each: each[:_NUM_SAMPLES] if isinstance(each, torch.Tensor) else each, values)


def _like(reference: torch.nn.Module, values: Any) -> Any:
    """Return values on the device "meta" if the model is there."""
    first = next(reference.parameters(), None)
    if first is None or not first.is_meta:
        return values
    return pytree.tree_map(lambda each: each.to("meta") if isinstance(each, torch.Tensor) else each, values)


def _whole(outputs: Any) -> Any:
    """Return outputs with tensors that are divided over ranks (a divided sequence) whole. Collective if any is.

    It looks into all that is compared later, which one of the ranks does alone: dataclasses, too.
    """

    def whole(value: Any) -> Any:
        if _is_divided(value):
            return value.full_tensor()
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return value
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, _whole(getattr(value, field.name)))  # it may be frozen
        return made

    return pytree.tree_map(whole, outputs)


def _is_divided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def _leaf(value: Any) -> Leaf | None:
    if not isinstance(value, torch.Tensor):
        return None
    if _is_divided(value):  # to make it whole would be collective
        raise NotComparableError("a tensor that is divided over ranks is in something that --verify cannot look into")
    values = None
    if not value.is_meta:
        whole = value.detach()
        whole = whole.float() if whole.dtype in (torch.bfloat16, torch.float16) else whole
        values = whole.cpu().numpy()
    return Leaf(tuple(value.shape), str(value.dtype).removeprefix("torch."), values)


__all__ = ["attach", "before_step", "output_check", "pieces_of", "warn_of_ignored"]
