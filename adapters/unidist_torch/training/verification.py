"""`--verify` for PyTorch: the unchanged model is kept until the first batch, and both models compute the same of it."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from unidist.checkpoint.format.interface import kept_state, placements_of
from unidist.checkpoint.format.pieces import Piece
from unidist.errors import UsageError
from unidist.negotiation import allgather_object
from unidist.strategy.interface import Plan, RunsSteps
from unidist.verification import Leaf, ReplicaCheck, difference, digests, raise_together
from unidist_torch.checkpoint.states import ModelState
from unidist_torch.framework import TorchFramework
from unidist_torch.memory import dtype_of
from unidist_torch.models.compiled_model import uncompiled, uncompiled_path
from unidist_torch.models.step_runner import LossFunction, StepRunner, call, evaluating
from unidist_torch.operations.functions import broadcast_parameters

if TYPE_CHECKING:
    from unidist.runtime.context import Context

_log = logging.getLogger("unidist")

_MAX_BYTES = 512 << 20
"""Of a model larger than this no values are kept: shapes and types alone are compared."""
_NUM_SAMPLES = 2
"""Samples of the first batch that are computed twice, where the model need not have the whole batch."""
_ATTRIBUTE = "_unidist_output_check"


def replica_check(model: torch.nn.Module, runtime: Context, plan: Plan) -> ReplicaCheck | None:
    """Return the comparison of the parameters that several ranks hold; None if there is none to be made."""
    verify = runtime.settings.verify
    may_differ = not all(strategy.keeps_replicas for strategy in plan.strategies)
    if not verify.first or may_differ or runtime.is_elastic or runtime.topology.world_size == 1:
        return None

    differ = bool(plan.model_axes) or any(strategy.changes_model for strategy in plan.strategies)
    return ReplicaCheck(runtime, lambda: _pieces_of(model), divided=differ, every=verify.every)


def _pieces_of(model: torch.nn.Module) -> list[Piece]:
    """Return the pieces of the parameters that this rank holds; none of a model that cannot be saved in pieces."""
    state = kept_state(model) or ModelState(model)
    names = _parameter_names(model)
    try:
        return [piece for piece in state.pieces() if piece.tensor.name in names]
    except UsageError:
        return []


def _parameter_names(model: torch.nn.Module) -> set[str]:
    """Return the names in the whole model of the parameters; buffers may differ between ranks."""
    model = uncompiled(model)
    places = placements_of(model)
    return {
        uncompiled_path(places.placement(path, tuple(parameter.shape), dtype_of(parameter)).name)
        for path, parameter in model.named_parameters()
    }


class OutputCheck:
    """Compares what the distributed model returns for the first batch with what the script's own model returns.

    Args:
        model: before any strategy has changed it, with rank 0's values.
        runtime: whose ranks.
        plan: of the run.
    """

    def __init__(self, model: torch.nn.Module, runtime: Context, plan: Plan) -> None:
        self._runtime = runtime
        self._plan = plan
        self._runs_steps = plan.find(RunsSteps) is not None
        self._has_values = _num_bytes(model) <= _MAX_BYTES
        # Ranks along the axes of the model have the same batch: one of them computes it.
        self._computes = all(runtime.axis_rank(axis) == 0 for axis in plan.model_axes)
        self._reference = self._copied(model) if self._computes else None

    def attach(self, model: torch.nn.Module) -> None:
        """Compare at the first call of the distributed model in training, or let `before_step` do so."""
        self._pieces = lambda: _pieces_of(model)
        self._digests = digests(self._pieces())
        if self._runs_steps:
            model.__dict__[_ATTRIBUTE] = self
            return

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if module.training and torch.is_grad_enabled():
                handle.remove()
                self._compare_call(module, args, kwargs)

        handle = model.register_forward_pre_hook(hook, with_kwargs=True)

    def before_step(self, runner: StepRunner, loss_fn: LossFunction, inputs: Any, targets: Any) -> None:
        """Compare outputs and loss of a batch before a strategy's runner trains on it. Collective over all ranks.

        Raises:
            MismatchError: on every rank; names the output and both values.
        """

        def expected() -> Any:
            assert self._reference is not None
            with evaluating(self._reference):
                outputs = call(self._reference, _like(self._reference, inputs))
                return outputs, loss_fn(outputs, _like(self._reference, targets))

        def found() -> Any:
            return runner.predict(inputs), runner.evaluate(inputs, targets)

        states = _RandomStates()
        try:
            self._compare(expected, found, ("the output", "the loss"))
        finally:
            states.restore()

    def _compare_call(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        args, kwargs = _first_samples((args, kwargs))
        reference, divided = self._reference, bool(self._plan.model_axes)
        states = _RandomStates()

        def run(module: torch.nn.Module) -> Any:
            if divided:  # its dropout draws other numbers, by design
                with evaluating(module):
                    return module(*args, **kwargs)
            states.restore()
            with torch.no_grad():
                return module(*args, **kwargs)

        def expected() -> Any:
            nonlocal args, kwargs
            assert reference is not None
            own = args, kwargs
            args, kwargs = _like(reference, own)
            try:
                outputs = run(reference)
                return (outputs,) if divided else (outputs, outputs)
            finally:
                args, kwargs = own

        def found() -> Any:
            first = run(model)
            # A strategy that gathers parameters when they are needed has had them there for the first pass.
            return (first,) if divided else (first, run(model))

        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        try:
            self._compare(expected, found, ("the output",) if divided else ("the output", "the output of another pass"))
        finally:
            states.restore()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def _compare(self, expected: Callable[[], Any], found: Callable[[], Any], names: tuple[str, ...]) -> None:
        wanted, obstacle = None, ""
        if digests(self._pieces()) != self._digests:
            obstacle = "its parameters were loaded or changed after it was distributed"
        elif self._reference is not None:
            before = _RandomStates()
            try:
                wanted = expected()
            except Exception as error:  # of the script's model, outside of its training: nothing to compare with
                obstacle = f"{type(error).__name__}: {error}"
            if self._plan.model_axes and before != _RandomStates():
                obstacle = "it draws random numbers, which a divided model draws in another order"
            before.restore()
        elif self._computes:
            obstacle = "it cannot be copied"
        self._reference = None
        obstacles = [text for text in allgather_object(self._runtime.operations(), obstacle, name="verify") if text]
        if obstacles:
            _log.info("--verify: the model's outputs are not compared: %s", obstacles[0])
            return
        outputs = found()
        text = ""
        if wanted is not None:
            coarse = self._plan.precision is not None
            parts = any(strategy.returns_parts for strategy in self._plan.strategies)
            texts = (
                difference(one, other, _leaf, coarse=coarse, parts=parts, path=name)
                for name, one, other in zip(names, wanted, outputs, strict=True)
            )
            text = next((each for each in texts if each), "")
        raise_together(self._runtime, text, strategies=" and ".join(each.name for each in self._plan.strategies))

    def _copied(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """Return a copy of the model, without values if they are too many; None if it cannot be copied."""
        memo: dict[int, Any] = {}
        if not self._has_values:
            for tensor in [*model.parameters(), *model.buffers()]:
                memo[id(tensor)] = tensor.detach().to("meta").requires_grad_(tensor.requires_grad)
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            _log.debug("--verify: %s cannot be copied: %s", type(model).__name__, error)
            return None


def output_check(model: torch.nn.Module, runtime: Context, plan: Plan, *, deferred: bool) -> OutputCheck | None:
    """Return the check of a model that a strategy is about to change; None if there is none to be made. Collective."""
    changes = any(strategy.changes_model for strategy in plan.strategies)
    if not runtime.settings.verify.first or not changes or deferred or runtime.topology.world_size == 1:
        return None
    if runtime.is_elastic or any(tensor.is_meta for tensor in model.parameters()):
        return None
    if not plan.model_axes:  # the others have had rank 0's values already
        broadcast_parameters(TorchFramework().model_state(model), root_rank=0)
    return OutputCheck(model, runtime, plan)


def pending_check(model: torch.nn.Module) -> OutputCheck | None:
    """Return the check that `attach` has left for the first step, once."""
    found: OutputCheck | None = model.__dict__.pop(_ATTRIBUTE, None)
    return found


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


def _num_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])


def _leaf(value: Any) -> Leaf | None:
    if not isinstance(value, torch.Tensor):
        return None
    values = None
    if not value.is_meta:
        whole = value.detach()
        whole = whole.float() if whole.dtype in (torch.bfloat16, torch.float16) else whole
        values = whole.cpu().numpy()
    return Leaf(tuple(value.shape), str(value.dtype).removeprefix("torch."), values)


__all__ = ["OutputCheck", "output_check", "pending_check", "replica_check"]
