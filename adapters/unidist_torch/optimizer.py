"""Binds an update to a torch optimizer: the optimizer stays what it is, its `step` goes through unidist.

The optimizer object keeps its identity, state and class for isinstance; its class is replaced by a subclass
whose `step` and `zero_grad` ask the binding first. Gradients are written to engine memory by
post-accumulate hooks, and `p.grad` becomes a view of it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from unidist.buckets import ParameterInfo
from unidist.buffer import HOST
from unidist.errors import ConfigurationError, UsageError
from unidist.update import Update
from unidist_torch.allocator import keep_freed_memory
from unidist_torch.memory import CopyInto, buffer_of, dtype_of, is_dense, memory_kind, tensor_of
from unidist_torch.sparse import SparseGradients

_log = logging.getLogger("unidist.torch")

# GradScaler hands itself to `step(grad_scaler=...)`, which is what lets the overflow check see reduced gradients.
warnings.filterwarnings("ignore", message="GradScaler is going to stop passing itself", category=FutureWarning)


class DistributedOptimizerMixin:
    """What a bound optimizer can do beyond its own class. Never instantiated; see `bind`."""

    _unidist: Binding
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Complete the exchange and update the parameters, or, inside a window of accumulate=N, do nothing.

        Args:
            closure: computes the loss again, as for any torch optimizer; its loss is averaged over the ranks.
            grad_scaler: given by torch's GradScaler.
        """
        return self._unidist.step(closure, grad_scaler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; inside a window of accumulate=N they are kept."""
        self._unidist.zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Complete the exchange: afterwards every `p.grad` holds the reduced gradient (to clip it, say).

        Inside a window of accumulate=N it does nothing. Every rank calls it alike.
        """
        self._unidist.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Do not exchange in `step` inside this block: `synchronize` was called before."""
        self._unidist.skip = True
        try:
            yield
        finally:
            self._unidist.skip = False

    def flush(self) -> bool:
        """Apply a window of accumulate=N that the end of an epoch cut short; with mean over the passes that were.

        Every rank calls it, also one whose window is empty.

        Returns:
            Whether there was anything to apply on any rank.
        """
        return self._unidist.flush()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does; their gradients are exchanged from the next update on. All ranks alike."""
        super().add_param_group(param_group)  # type: ignore[misc]  # of the torch optimizer
        self._unidist.changed = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the plain optimizer: what binds it to this process stays here."""
        plain = type(self).__mro__[2]
        return plain.__new__, (plain,), self.__getstate__()


def bind(optimizer: torch.optim.Optimizer, update: Update, *, names: Mapping[str, torch.Tensor] | None) -> Any:
    """Bind `update` to `optimizer` and return it; see `Framework.bind_update`. Collective."""
    if isinstance(optimizer, DistributedOptimizerMixin):
        raise UsageError("this optimizer is distributed already; call distribute() or DistributedOptimizer() once")
    plain = type(optimizer)
    wrapped_step = optimizer.__dict__.pop("step", None)  # a scheduler made earlier has wrapped the plain step
    optimizer.__class__ = type(plain.__name__, (DistributedOptimizerMixin, plain), {"__doc__": plain.__doc__})
    optimizer._unidist = Binding(optimizer, plain, update, names)  # type: ignore[attr-defined]
    if wrapped_step is not None:
        _rewrap(optimizer)
    return optimizer


def _rewrap(optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler that was made before see that `step` is called: it looks for these two attributes."""
    bound = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return bound(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


class Binding:
    """The state of one bound optimizer.

    Args:
        optimizer: the optimizer, already of its new class.
        plain: its class before.
        update: the framework-free side.
        names: paths of parameters, where known.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain: type[torch.optim.Optimizer],
        update: Update,
        names: Mapping[str, torch.Tensor] | None,
    ) -> None:
        self.skip = False
        self.changed = False
        self._optimizer = optimizer
        self._plain = plain
        self._update = update
        self._names = {id(tensor): name for name, tensor in (names or {}).items()}
        self._parameters: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self._places: list[CopyInto] = []
        self._index: dict[int, int] = {}
        self._hooks: list[Any] = []
        self._callback_queued = False
        self._sparse = SparseGradients(update.context)
        self._agree()

    # What the optimizer's methods do

    def step(self, closure: Callable[[], Any] | None, grad_scaler: Any) -> Any:
        """See `DistributedOptimizerMixin.step`."""
        if closure is not None:
            return self._step_with_closure(closure)
        accumulation = self._update.accumulation
        if grad_scaler is not None and accumulation.stepwise and accumulation.passes > 1:
            raise UsageError(
                f"GradScaler with accumulate={accumulation.passes}: the scaler would change its scale inside a window, "
                "between gradients that are added up. Use bfloat16, which needs no scaler, or "
                "backward_passes_per_step."
            )
        if not self._update.begin_step():
            return None
        if not (self.skip or self._update.finished):
            self._finish()
        loss = self._inner_step(grad_scaler)
        self._applied()
        return loss

    def zero_grad(self, set_to_none: bool) -> None:
        """See `DistributedOptimizerMixin.zero_grad`."""
        if self._update.window_open:
            return
        if self._update.in_round:
            # Buckets may be on their way: complete the round on every rank alike, then forget it.
            self._update.finish()
        self._plain.zero_grad(self._optimizer, set_to_none)
        self._callback_queued = False  # of a backward pass that raised before its end
        self._sparse.clear()
        self._update.reset_window()

    def synchronize(self) -> None:
        """See `DistributedOptimizerMixin.synchronize`."""
        if self._update.completes_window and not self._update.finished:
            self._finish()

    def flush(self) -> bool:
        """See `DistributedOptimizerMixin.flush`."""
        scale = self._update.short_window_scale()
        if scale is None:
            return False
        self._finish(scale=scale)
        self._inner_step(None)
        self._applied()
        return True

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        if self._update.accumulation.passes > 1:
            raise UsageError("step(closure) and accumulation of several passes do not go together; use one of them")

        def reduced() -> Any:
            loss = closure()
            self._finish()
            self._update.reset_window()
            return self._mean_loss(loss)

        loss = self._plain.step(self._optimizer, reduced)
        self._applied()
        return loss

    def _mean_loss(self, loss: Any) -> Any:
        """Average the loss over the ranks: an optimizer that looks at it must decide alike everywhere."""
        value = torch.as_tensor(loss, dtype=torch.float64).detach().reshape(1).cpu()
        communicator = self._update.context.axis("data")
        communicator.allreduce(buffer_of(value), buffer_of(value), scale=1.0 / communicator.size).wait()
        if isinstance(loss, torch.Tensor):
            return value.to(device=loss.device, dtype=loss.dtype).reshape(loss.shape)
        return float(value)

    def _inner_step(self, grad_scaler: Any) -> Any:
        if grad_scaler is None:
            return self._plain.step(self._optimizer)
        # The gradients are reduced, so every rank finds the same overflows and the scalers stay equal.
        state = grad_scaler._per_optimizer_states[id(self._optimizer)]
        if state["stage"].name == "READY":
            grad_scaler.unscale_(self._optimizer)
        if any(found.item() for found in state["found_inf_per_device"].values()):
            return None
        return self._plain.step(self._optimizer)

    def _applied(self) -> None:
        self._callback_queued = False
        self._sparse.clear()
        self._update.applied()

    # Gradients

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            self._take(index, parameter)

        return hook

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient has been computed: bring it into its place, and say so."""
        gradient = parameter.grad
        assert gradient is not None
        update = self._update
        if gradient.layout is not torch.strided:
            self._take_sparse(index, parameter, gradient)
            return
        if update.in_backward:
            self._finish_after_backward()
        view = self._views[index]
        place = self._places[index]
        if not place.holds(gradient):
            if update.has_gradient(index):
                with torch.no_grad():
                    view.add_(gradient)
            else:
                place.copy(gradient)
        # Before the last pass of a window the script must not see half a sum: it might clip it.
        parameter.grad = view if update.is_last_pass(index) else None
        update.gradient_ready(index)

    def _finish_after_backward(self) -> None:
        """Complete the exchange when this backward pass ends, if it is the last of its window."""
        if self._callback_queued or not self._update.completes_window:
            return
        self._callback_queued = True

        def finish() -> None:
            self._callback_queued = False
            self._finish()

        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _take_sparse(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._update.in_backward:
            self._finish_after_backward()
        if not self._sparse.agreed(index):
            self.changed = True
        self._sparse.add(index, gradient)
        if not self._update.is_last_pass(index) or self._update.accumulation.passes > 1:
            parameter.grad = None
        self._update.pass_without_buffer(index)

    def _finish(self, *, scale: float | None = None) -> None:
        """Complete the exchange and give every parameter its reduced gradient. Collective."""
        self._watch()
        notice = self._finish_from(0, scale)
        if notice:  # on some rank something is trained that was not agreed on
            self.changed = False
            known = len(self._parameters)
            self._agree()
            if len(self._parameters) > known:
                self._finish_from(known, scale)
        self._sparse.exchange(self._parameters, scale=self._update.scale if scale is None else scale)

    def _finish_from(self, first: int, scale: float | None) -> int:
        """Complete the exchange of the parameters from number `first` on; returns the ranks' notice."""
        self._take_stray(first)
        present, notice = self._update.finish(notice=int(self.changed), scale=scale, first_parameter=first)
        for index, is_present in enumerate(present, start=first):
            if is_present:
                self._parameters[index].grad = self._views[index]
            elif not self._sparse.agreed(index):
                self._parameters[index].grad = None
        return notice

    def _take_stray(self, first: int) -> None:
        """Take gradients that no hook has seen: set by hand, or kept from an earlier update."""
        for index in range(first, len(self._parameters)):
            gradient = self._parameters[index].grad
            if gradient is None or self._update.has_gradient(index) or gradient.layout is not torch.strided:
                continue
            if not self._places[index].holds(gradient):
                self._places[index].copy(gradient)
            self._update.hold(index)

    # Which parameters

    def _agree(self) -> None:
        """Agree with the other ranks on the parameters; those that are new get a place and a hook. Collective."""
        listed = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        described = [
            (
                self._names.get(id(parameter), f"parameter.{position}"),
                tuple(parameter.shape),
                str(dtype_of(parameter)),
                bool(parameter.requires_grad),
                self._sparse.pending(self._index.get(id(parameter), -1)),
            )
            for position, parameter in enumerate(listed)
        ]
        everyone = self._sparse.gather(described)
        _check_alike(everyone, self._update.context.topology.rank)
        new = []
        for position, parameter in enumerate(listed):
            known = self._index.get(id(parameter))
            if known is None:
                if any(ranks[position][3] for ranks in everyone):
                    new.append((described[position][0], parameter))
            elif any(ranks[position][4] for ranks in everyone):
                self._sparse.agree(known)
        infos = [
            ParameterInfo(name, tuple(parameter.shape), dtype_of(parameter), memory_kind(parameter))
            for name, parameter in new
        ]
        first = len(self._parameters)
        self._update.add_parameters(infos)
        if any(info.memory == HOST for info in infos):
            keep_freed_memory()
        for index, (_, parameter) in enumerate(new, start=first):
            self._parameters.append(parameter)
            self._index[id(parameter)] = index
            view = _shaped(tensor_of(self._update.buffer(index)), parameter)
            self._views.append(view)
            self._places.append(CopyInto(view))
        self._watch()

    def _watch(self) -> None:
        """Hook every parameter that can have a gradient and has no hook yet; notice those without a place.

        What is trained may change while training goes on: layers are unfrozen, groups are added.
        """
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._index:
                    self.changed = True
        self._hooks += [None] * (len(self._parameters) - len(self._hooks))
        for index, parameter in enumerate(self._parameters):
            if self._hooks[index] is None and parameter.requires_grad:
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(self._make_hook(index))


def _shaped(flat: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the flat memory in the parameter's shape and memory order, which fused optimizers rely on."""
    if is_dense(parameter):
        return flat.as_strided(parameter.shape, parameter.stride())
    return flat.view(parameter.shape)


def _check_alike(everyone: list[list[tuple[Any, ...]]], rank: int) -> None:
    """Raise on every rank where the optimizers' parameters differ, with the first difference."""
    counts = [len(described) for described in everyone]
    if len(set(counts)) > 1:
        listed = ", ".join(f"rank {other}: {count}" for other, count in enumerate(counts))
        raise ConfigurationError(
            f"the optimizers have different numbers of parameters ({listed}). Build one model on every rank."
        )
    for position, first in enumerate(everyone[0]):
        for other, described in enumerate(everyone):
            if described[position][1:3] != first[1:3]:
                raise ConfigurationError(
                    f"parameter {first[0]!r} is {first[2]}{list(first[1])} on rank 0, but on rank {other} there is "
                    f"{described[position][0]!r}, {described[position][2]}{list(described[position][1])}, in its place "
                    f"(seen on rank {rank}). Build one model on every rank."
                )
