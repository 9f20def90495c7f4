"""The state of one bound torch optimizer: its parameters, their places in the buckets, and the order of an update.

Gradients are written to engine memory by post-accumulate hooks, and `p.grad` becomes a view of it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from unidist import autotune
from unidist.buckets import ParameterInfo
from unidist.buffer import HOST
from unidist.carried import carry
from unidist.checkpoint.pieces import Placement
from unidist.checkpoint.state import KeepsState
from unidist.errors import UsageError
from unidist.parameter_agreement import Description, check_alike, sparse_anywhere, trained_anywhere
from unidist.update import Update
from unidist_torch.allocator import keep_freed_memory
from unidist_torch.announcing import Announcing
from unidist_torch.framework import TorchFramework
from unidist_torch.inner_step import InnerStep, WholeStep
from unidist_torch.memory import buffer_of, dtype_of, memory_kind
from unidist_torch.parameters import describe
from unidist_torch.places import Place, place_of
from unidist_torch.shared_gradient import SharedGradient, shared_gradient
from unidist_torch.sparse import SparseGradients

if TYPE_CHECKING:
    from unidist.context import Context


class Binding:
    """The state of one bound optimizer.

    Args:
        optimizer: the optimizer, already of its new class.
        plain: its class before.
        update: the framework-free side.
        names: paths of parameters, where known.

    Attributes:
        skip: `step` shall not exchange.
        changed: this rank trains something that was not agreed on.
        warns: `step` after `synchronize` without `skip_synchronize` warns, as Horovod does.
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
        self.warns = False
        self._synchronized = False
        self._optimizer = optimizer
        self._plain = plain
        self._update = update
        self._names = {id(tensor): name for name, tensor in (names or {}).items()}
        self._begin()
        carry(update, self)

    def _begin(self) -> None:
        """Make what belongs to the present context. Collective."""
        optimizer, plain, update = self._optimizer, self._plain, self._update
        self._parameters: list[torch.Tensor] = []
        self._places: list[Place] = []
        self._index: dict[int, int] = {}
        self._hooks: list[Any] = []
        self._callback_queued = False
        self._tuner: autotune.Tuner | None = None
        sharding = update.sharding
        if sharding is None:
            self._inner: InnerStep = WholeStep(optimizer, plain, update)
        else:
            self._inner = sharding.half_for(TorchFramework())(optimizer, plain, update)
        self._shows = not self._inner.shares
        options = update.options  # after the inner step was made, which may have changed them
        self._sparse = SparseGradients(options.communicator(update.context), as_dense=options.sparse_as_dense)
        self._announcing = Announcing(
            update, self._take_part, self._take_part_in_flush, self._take_part_in_loss, update.end_pass
        )
        self._agree()
        self._tuner = autotune.tuner_for(update)

    def move_to(self, context: Context) -> None:
        """See `Carried.move_to`: parameters and the optimizer's state stay where they are, gradients are forgotten."""
        for hook in self._hooks:
            if hook is not None:
                hook.remove()
        for parameter in self._parameters:
            parameter.grad = None
        self.changed = self._synchronized = False
        self._update.move_to(context)
        self._begin()

    # What the optimizer's methods do

    def step(self, closure: Callable[[], Any] | None, grad_scaler: Any) -> Any:
        """See `DistributedOptimizerMixin.step`."""
        if closure is not None:
            return self._step_with_closure(closure)
        accumulation = self._update.accumulation
        if grad_scaler is not None and self._update.rules is not None:
            raise UsageError(
                "torch's GradScaler and a strategy that clips or scales gradients (clip_norm, clip_value, "
                "precision=fp16): the strategy acts when the backward pass ends, before the scaler has unscaled. Leave "
                "the scaler out and use --strategy precision=fp16, or clip after scaler.unscale_(optimizer)"
            )
        if grad_scaler is not None and accumulation.stepwise and accumulation.passes > 1:
            raise UsageError(
                f"GradScaler with accumulate={accumulation.passes}: the scaler would change its scale inside a window, "
                "between gradients that are added up. Use bfloat16, which needs no scaler, or "
                "backward_passes_per_step."
            )
        if self._update.reduces_each_pass and not self._update.completes_window:
            self._announcing.end_of_pass()
        if not self._update.begin_step():
            return None
        self._check_order()
        if not (self.skip or self._update.window.finished):
            self._finish()
        loss = self._inner_step(grad_scaler)
        self._applied()
        return loss

    def zero_grad(self, set_to_none: bool) -> None:
        """See `DistributedOptimizerMixin.zero_grad`."""
        if self._update.window.is_open:
            return
        if self._update.window.in_round:
            # Buckets may be on their way: complete the round on every rank alike, then forget it.
            self._finish()
        self._plain.zero_grad(self._optimizer, set_to_none or not self._shows)
        self._callback_queued = False  # of a backward pass that raised before its end
        self._sparse.clear()
        self._update.reset_window()

    def synchronize(self) -> None:
        """See `DistributedOptimizerMixin.synchronize`."""
        if self._update.completes_window:
            if not self._update.window.finished:
                self._finish()
            self._synchronized = True

    def clip_norm(self, max_norm: float, order: float) -> float:
        """See `clipping.clip_grad_norm_`."""
        if not self._update.completes_window:
            return 0.0
        if not self._update.window.finished:
            self._finish()
        norm = self._update.clip_norm(max_norm, order, self._sparse.reduced(self._parameters))
        if self._sparse.as_dense:
            for index, parameter in enumerate(self._parameters):
                if self._sparse.agreed(index) and parameter.grad is not None:
                    parameter.grad = self._shown(index, parameter)
            self._sparse.make_sparse(self._parameters)
        return norm

    def flush(self) -> bool:
        """See `DistributedOptimizerMixin.flush`."""
        self._announcing.flush()
        scale = self._update.short_window_scale()
        if scale is None:
            return False
        self._complete(scale=scale)
        self._inner_step(None)
        self._applied()
        return not self._update.overflowed

    def settle(self) -> None:
        """Complete the exchange that is under way, if there is one."""
        if self._update.window.in_round and self._update.completes_window:
            self._finish()
        self._synchronized = False

    @property
    def shares(self) -> bool:
        """Each rank updates a share of the parameters."""
        return self._inner.shares

    @property
    def passes(self) -> int:
        """Backward passes per update."""
        return self._update.accumulation.passes

    def set_passes(self, passes: int) -> None:
        """See `DistributedOptimizerMixin.set_backward_passes_per_step`."""
        self._update.set_passes(passes)

    def take_steps(self, steps: int) -> None:
        """See `Update.take_steps`."""
        self._update.take_steps(steps)

    def state_dict(self) -> dict[str, Any] | None:
        """See `InnerStep.state_dict`."""
        return self._inner.state_dict()

    def state_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """See `InnerStep.state_loaded`."""
        self._inner.state_loaded(state_dict)

    def kept_state(self, placements: Mapping[int, Placement]) -> KeepsState | None:
        """See `InnerStep.kept_state`."""
        return self._inner.kept_state(placements)

    def _check_order(self) -> None:
        if self.skip and self._update.window.in_round:
            raise UsageError(
                "step() inside skip_synchronize(), but synchronize() was not called since backward(): the gradients "
                "are not reduced. Call optimizer.synchronize() before, or step() without skip_synchronize()."
            )
        if self.warns and self._synchronized and not self.skip:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Horovod exchanges the gradients a second time here; put step() into "
                "`with optimizer.skip_synchronize():`.",
                stacklevel=4,
            )
        self._synchronized = False

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        if self._update.accumulation.passes > 1:
            raise UsageError("step(closure) and accumulation of several passes do not go together; use one of them")
        if self._update.scaler is not None:
            raise UsageError(
                "step(closure) and a scaled loss do not go together: an overflow shows when the step has begun. Call "
                "the closure before step(), or use precision=bf16, which needs no scaling"
            )

        if self._inner.shares:  # which no closure finds: the step begins when the gradients are there
            with torch.enable_grad():
                loss = closure()
            self._finish()
            loss = self._mean_loss(loss)
            self._inner_step(None)
            self._applied()
            return loss

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
        self._announcing.loss()
        self._average(value)
        if isinstance(loss, torch.Tensor):
            return value.to(device=loss.device, dtype=loss.dtype).reshape(loss.shape)
        return float(value)

    def _average(self, value: torch.Tensor) -> None:
        communicator = self._update.communicator
        communicator.allreduce(buffer_of(value), buffer_of(value), scale=1.0 / communicator.size).wait()

    def _inner_step(self, grad_scaler: Any) -> Any:
        if self._update.overflowed:
            self._inner.skip()
            return None
        return self._inner.step(grad_scaler)

    def _applied(self) -> None:
        self._callback_queued = False
        self._sparse.clear()
        if self._update.overflowed:
            self._update.reset_window()
        else:
            self._update.applied()

    # What this rank does for the others after it has joined

    def _take_part(self) -> None:
        self._take_part_in(None)

    def _take_part_in_flush(self) -> None:
        scale = self._update.short_window_scale()
        if scale is not None:
            self._take_part_in(scale)

    def _take_part_in_loss(self) -> None:
        self._average(torch.zeros(1, dtype=torch.float64))

    def _take_part_in(self, scale: float | None) -> None:
        """Exchange without gradients, except for those of a window that `join` has cut short."""
        for parameter in self._parameters:
            parameter.grad = None
        self._complete(scale=scale)
        if self._update.overflowed:
            self._inner.skip()
        else:
            self._inner.take_part()
        for parameter in self._parameters:
            parameter.grad = None
        self._update.reset_window()

    # Gradients

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        owner = weakref.ref(self)  # Python's collector does not see through a parameter's hooks

        def hook(parameter: torch.Tensor) -> None:
            binding = owner()
            if binding is not None:
                binding._take(index, parameter)

        return hook

    def gradient_computed(self, parameter: torch.Tensor) -> None:
        """Take a gradient that did not come from autograd's own accumulation, see `step_runner.gradient_computed`."""
        index = self._index.get(id(parameter))
        if index is None:
            self.changed = True  # it is agreed on when the round is complete, which finds the gradient
        else:
            self._take(index, parameter)

    def gradient_memory(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """See `step_runner.gradient_memory`."""
        index = self._index.get(id(parameter))
        return None if index is None or self._update.has_gradient(index) else self._places[index].view

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient has been computed: bring it into its place, and say so."""
        gradient = parameter.grad
        assert gradient is not None
        update = self._update
        if update.in_backward:
            self._finish_after_backward()
        if gradient.layout is not torch.strided:
            if not self._sparse.agreed(index):
                self.changed = True
            if not self._sparse.as_dense:
                if self._inner.shares:
                    self._refuse_sparse(index)
                self._take_sparse(index, parameter, gradient)
                return
            gradient = self._sparse.densify(index, gradient)
        place = self._places[index]
        if not place.holds(gradient):
            if update.has_gradient(index):
                place.add(gradient)
            else:
                place.copy(gradient)
        # Before the last pass of a window the script must not see half a sum: it might clip it.
        parameter.grad = self._shown(index, parameter) if update.window.is_last_pass(index) else None
        update.gradient_ready(index)

    def _shown(self, index: int, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what the script sees as a gradient."""
        return self._places[index].view if self._shows else shared_gradient(parameter)

    def _finish_after_backward(self) -> None:
        """Complete the exchange when this backward pass ends, if it is the last of its window."""
        if self._callback_queued or not self._update.completes_window:
            return
        self._callback_queued = True

        def finish() -> None:
            self._callback_queued = False
            self._finish()

        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _refuse_sparse(self, index: int) -> None:
        raise UsageError(
            f"the gradient of {self._update.parameters[index].name!r} is sparse, and strategies that share out updates "
            "take dense ones. Make the embedding with sparse=False, or bind the optimizer with "
            "DistributedOptimizer(sparse_as_dense=True)"
        )

    def _take_sparse(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._sparse.add(index, gradient)
        if not self._update.window.is_last_pass(index) or self._update.accumulation.passes > 1:
            parameter.grad = None
        self._update.pass_without_buffer(index)

    def _finish(self) -> None:
        """Complete the exchange and give every parameter its reduced gradient. Collective."""
        self._announcing.update()
        self._complete(scale=None)

    def _complete(self, *, scale: float | None) -> None:
        self._watch()
        notice = self._finish_from(0, scale)
        if notice:  # on some rank something is trained that was not agreed on
            self.changed = False
            known = len(self._parameters)
            self._agree()
            if len(self._parameters) > known:
                self._finish_from(known, scale)
        self._sparse.exchange(self._parameters, scale=self._update.whole_scale(scale))
        self._update.conclude(self._sparse.reduced(self._parameters))
        self._sparse.make_sparse(self._parameters)
        if self._tuner is not None and self._tuner.due():
            self._retune(self._tuner)

    def _retune(self, tuner: autotune.Tuner) -> None:
        """Use what rank 0 wants to try, or to keep. Collective."""
        is_first = self._update.communicator.rank == 0
        choice: autotune.Choice = self._sparse.gather(tuner.next_choice() if is_first else None)[0]
        if autotune.apply(choice, self._update):
            self._place_gradients(0)
        tuner.restart()
        if choice.final:
            self._tuner = None

    def _finish_from(self, first: int, scale: float | None) -> int:
        """Complete the exchange of the parameters from number `first` on; returns the ranks' notice."""
        self._take_stray(first)
        present, notice = self._update.finish(notice=int(self.changed), scale=scale, first_parameter=first)
        dense = self._sparse.as_dense
        self._inner.take(
            first,
            [
                None if not (is_present or dense) and self._sparse.agreed(index) else is_present
                for index, is_present in enumerate(present, start=first)
            ],
        )
        return notice

    def _take_stray(self, first: int) -> None:
        """Take gradients that no hook has seen: set by hand, or kept from an earlier update."""
        for index in range(first, len(self._parameters)):
            gradient = self._parameters[index].grad
            if gradient is None or self._update.has_gradient(index) or isinstance(gradient, SharedGradient):
                continue
            if gradient.layout is not torch.strided:
                if not self._sparse.as_dense:
                    continue
                gradient = gradient.to_dense()
            if not self._places[index].holds(gradient):
                self._places[index].copy(gradient)
            self._update.hold(index)
            if not self._shows:
                self._parameters[index].grad = None  # its share will be elsewhere

    # Which parameters

    def _agree(self) -> None:
        """Agree with the other ranks on the parameters; those that are new get a place and a hook. Collective."""
        self._inner.before_agreement()
        listed = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        described = tuple(
            describe(parameter, position, self._names, sparse=self._sparse.pending(self._index.get(id(parameter), -1)))
            for position, parameter in enumerate(listed)
        )
        choices = f"{self._update.options}, {'mean' if self._update.average else 'sum'} over the ranks"
        everyone: list[Description] = self._sparse.gather(Description(choices, described))
        check_alike(everyone, self._sparse.members, self._update.context.topology.rank)
        groups = self._update.options.group_numbers(
            [position for position in range(len(listed)) if trained_anywhere(everyone, position)]
        )
        sparse = sparse_anywhere(everyone)
        new = []
        for position, parameter in enumerate(listed):
            known = self._index.get(id(parameter))
            if known is None:
                if trained_anywhere(everyone, position):
                    new.append((position, parameter))
            elif position in sparse:
                self._sparse.agree(known)
        infos = [
            ParameterInfo(
                described[position].name,
                tuple(parameter.shape),
                dtype_of(parameter),
                memory_kind(parameter),
                groups.get(position),
            )
            for position, parameter in new
        ]
        first = len(self._parameters)
        self._update.add_parameters(infos)
        if any(info.memory == HOST for info in infos):
            keep_freed_memory()
        for index, (_, parameter) in enumerate(new, start=first):
            self._parameters.append(parameter)
            self._index[id(parameter)] = index
        self._place_gradients(first)
        self._watch()

    def _place_gradients(self, first: int) -> None:
        """Find the places for the gradients of the parameters from number `first` on."""
        del self._places[first:]
        for index in range(first, len(self._parameters)):
            self._places.append(place_of(self._update, index, self._parameters[index]))
        self._inner.parameters_changed(self._parameters, first, [place.view for place in self._places])

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
