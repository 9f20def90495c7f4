"""The state of one bound torch optimizer, the work of its methods, and the order of an update."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from unidist.checkpoint.format.interface import KeepsState
from unidist.checkpoint.format.pieces import Placement
from unidist.elastic.rebinding import follow_generations
from unidist.errors import PluginError, UsageError
from unidist.optim.actors import Actors, check_keeps_parameters
from unidist.optim.rules import GradientRule, NormRule, ValueRule
from unidist.optim.update import Update
from unidist.training import autotune
from unidist_torch.composed import parts_of, shares_groups
from unidist_torch.cuda_graphs import refuse_capture
from unidist_torch.framework import TorchFramework
from unidist_torch.gradients.partial_gradient import PartNorms
from unidist_torch.gradients.sparse import SparseGradients
from unidist_torch.memory import buffer_of
from unidist_torch.models import plain_use
from unidist_torch.models.model_buffers import BufferRule, ModelBuffers
from unidist_torch.optimizer.announcements import OptimizerAnnouncements
from unidist_torch.optimizer.elementwise import needs_closure
from unidist_torch.optimizer.gathered_step import CutTensor, GatheredStep
from unidist_torch.optimizer.grad_scaler import unscale
from unidist_torch.optimizer.horovod_arguments import named
from unidist_torch.optimizer.inner_step import InnerStep, WholeStep
from unidist_torch.optimizer.parameter_gradients import ParameterGradients
from unidist_torch.optimizer.trained_state import TorchTrainedState

if TYPE_CHECKING:
    from unidist.runtime_api import RuntimeAPI


_LAST_RANK = 254
"""The last one whose number fits into a flag."""


class Binding:
    """The state of one bound optimizer.

    Args:
        optimizer: the optimizer, already of its new class.
        plain: its class before.
        update: the framework-free side.
        names: paths of parameters, where known.
        cut: identities of the parameters of which this rank has a part.
        gathered: those that the optimizer looks at as a whole.

    Attributes:
        distributed_update: see Args.
        gradients: of its parameters, in the present context.
        skip: `step` shall not exchange.
        is_horovods: it was made by `DistributedOptimizer`. `step` after `synchronize` without `skip_synchronize` warns,
            and `step(closure)` returns this rank's loss, as in Horovod.
        make_new_equal: gives parameters that a group brings the same values on all ranks; None: the script does so.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain: type[torch.optim.Optimizer],
        update: Update,
        names: Mapping[str, torch.Tensor] | None,
        cut: Collection[int] = (),
        gathered: Sequence[CutTensor] = (),
    ) -> None:
        self.skip = False
        self.is_horovods = False
        self._synchronized = False
        self._is_concluded = False  # the reduced gradients are clipped
        self._optimizer = optimizer
        self._plain = plain
        self._update = self.distributed_update = update
        self._names = {id(tensor): name for name, tensor in (names or {}).items()}
        self._cut = cut
        self._gathered = gathered
        self._is_released = False
        self._buffers: ModelBuffers | None = None
        self.make_new_equal: Callable[[Sequence[torch.Tensor]], None] | None = None
        self._begin()
        follow_generations(self)

    def _begin(self) -> None:
        """Set up everything that belongs to the present context. Collective."""
        optimizer, plain, update = self._optimizer, self._plain, self._update
        self._tuner: autotune.Tuner | None = None
        brings = update.inner_steps
        if brings is None and self._gathered:
            self._inner: InnerStep = GatheredStep(optimizer, plain, update, self._gathered)
        elif brings is None:
            self._inner = WholeStep(optimizer, plain, update)
        else:
            self._refuse_gathered(update)
            made = brings.inner_step(TorchFramework(), update.context)(optimizer, plain, update)
            if not isinstance(made, InnerStep):
                raise PluginError(f"{type(made).__qualname__} does not derive from unidist_torch.optimizer.InnerStep")
            self._inner = made
        if update.actors is not None:
            check_keeps_parameters(self._inner, update.actors.names)
        options = update.options  # after the inner step was made, which may have changed them
        self._sparse = SparseGradients(options.communicator(update.context), as_dense=options.sparse_as_dense)
        self.gradients = ParameterGradients(
            optimizer,
            self._names,
            update=update,
            inner=self._inner,
            sparse=self._sparse,
            finish=self._finish,
            end_extra_pass=self._end_extra_pass,
            cut=dict.fromkeys(self._cut, self._part_norms()) if self._cut else {},
        )
        update.trained = TorchTrainedState(optimizer, self.gradients.parameters, self._inner)
        self._announcements = OptimizerAnnouncements(
            update,
            self._take_part,
            self._take_part_in_flush,
            self._take_part_in_loss,
            update.end_pass,
            update.end_extra_pass,
        )
        self.gradients.agree()
        self._tuner = autotune.tuner_for(update)

    def _refuse_gathered(self, update: Update) -> None:
        """Raise UsageError if parameters are to be gathered, and a strategy makes the step in its own way."""
        if self._gathered:
            names = ", ".join(strategy.name for strategy in update.strategies)
            raise UsageError(
                f"{self._plain.__name__} looks at a parameter's whole tensor, and "
                f"{self._gathered[0].placement.name!r} (with {len(self._gathered) - 1} more) is cut over ranks, where "
                f"a strategy here ({names}) makes the step in its own way. Leave zero out, or use an "
                "element-wise optimizer (SGD, Adam, AdamW, RMSprop, ...), or pipeline in place of tensor"
            )

    def _part_norms(self) -> PartNorms:
        """Return the norms of cut parameters' gradients. Collective over the ranks that have their parts."""
        context = self._update.context
        axes = context.mesh.model_axes
        return PartNorms(context.new_communicator(axes[0]) if len(axes) == 1 else None)

    def keep_buffers(self, model: torch.nn.Module, rule: BufferRule) -> None:
        """Keep the model's buffers the same on all ranks, from each update on."""
        if rule == "own" or (self._update.num_ranks == 1 and not self._update.context.is_elastic):
            return
        update = self._update
        self._buffers = ModelBuffers(
            model, rule, lambda memory: update.context.axis(update.options.gradient_axis, memory=memory)
        )

    def group_added(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take the parameters of another group into the exchange, from the next update on."""
        if parts_of(self._optimizer) and not shares_groups(self._optimizer):
            raise UsageError(
                f"add_param_group() gave parameters to {self._plain.__name__}, which leaves the step to optimizers "
                "within it: none of them has got these. Make the optimizers with all parameters, and freeze some"
            )
        if self.make_new_equal is not None:
            self.make_new_equal(parameters)
        self.gradients.changed = True

    def release(self) -> None:
        """See `DistributedOptimizerMixin.release`."""
        self.complete_exchange()
        self._is_released = True
        self.gradients.close()

    def rebind(self, context: RuntimeAPI) -> None:
        """Move to a new generation's context: parameters and state stay where they are, gradients are dropped."""
        if self._is_released:
            return
        self.gradients.close()
        self._synchronized = self._is_concluded = False
        self._update.rebind(context)
        self._begin()
        if self._buffers is not None:
            self._buffers.rebind()

    # The optimizer's methods

    def step(self, closure: Callable[[], Any] | None, grad_scaler: Any) -> Any:
        """Complete the exchange and do the inner step, unless a window is open."""
        if self._is_released:
            raise UsageError("release() was called: this optimizer has let go of its parameters, and cannot step")
        for parameter in self.gradients.parameters[:1]:
            refuse_capture("optimizer.step()", parameter)
        if closure is not None and not self._evaluates_once:
            return self._step_with_closure(closure)
        accumulation = self._update.accumulation
        if grad_scaler is not None and self._update.rules is not None:
            raise UsageError(
                "torch's GradScaler and a strategy that clips or scales gradients (clip_norm, clip_value, "
                "precision=fp16): the strategy needs the gradients unscaled before the scaler's step. Leave the scaler "
                "out and use --strategy precision=fp16, or clip after scaler.unscale_(optimizer)"
            )
        if grad_scaler is not None and accumulation.stepwise and accumulation.passes > 1:
            raise UsageError(
                f"GradScaler with accumulate={accumulation.passes}: the scaler would change its scale inside a window, "
                "between gradients that are added up. Use bfloat16, which needs no scaler, or "
                "backward_passes_per_step."
            )
        loss = None
        if closure is not None:
            self._refuse_several_evaluations()
            with torch.enable_grad():
                loss = closure()
        if accumulation.passes > 1 and not self._update.completes_window:
            self.gradients.take_set_by_hand()
            if self._update.syncs and self._update.reduces_each_pass:
                self._announcements.announce_end_of_pass()
        if not self._update.begin_step():
            return loss
        self._check_order()
        if self.skip:
            self._conclude()
        else:
            self._complete_window()
        if closure is not None:
            own, loss = loss, self._mean_loss(loss)
        result = self._inner_step(grad_scaler)
        self._applied()
        if closure is None:
            return result
        return own if self.is_horovods else loss

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop the gradients, unless a window is open; complete an exchange under way first."""
        self._update.position.reset()
        if self._update.window.is_open:
            return
        if self._update.window.in_round:
            # Buckets may be on their way: complete the round on every rank, then drop its result.
            self._finish()
        with plain_use():
            self._plain.zero_grad(self._optimizer, set_to_none or self._inner.sharded)
        self.gradients.finish_queued = False  # of a backward pass that raised before its end
        self._sparse.clear()
        self._update.reset_window()

    def synchronize(self) -> None:
        """Complete the exchange of this window, if this was its last pass."""
        if self._update.completes_window:
            self._complete_window()
            self._synchronized = True

    def clip_norm(self, max_norm: float, order: float) -> float:
        """Clip the reduced gradients; returns their norm before, 0 if no update is completed."""
        if not self._update.completes_window:
            return 0.0
        rule = NormRule(max_norm, order)
        return rule.norm if self._apply_once(rule) else math.inf

    def clip_value(self, limit: float) -> None:
        """Move each element of the reduced gradients into [-limit, limit], if an update is completed."""
        if self._update.completes_window:
            self._apply_once(ValueRule(limit))

    def _apply_once(self, rule: GradientRule) -> bool:
        self._complete_window()
        applied = self._update.apply_once(rule, self._sparse.reduced(self.gradients.parameters))
        self.gradients.refresh_sparse()
        self.gradients.mark_parts()
        return applied

    def flush(self) -> bool:
        """Apply a window that was cut short; returns whether there was anything to apply."""
        self._announcements.announce_flush()
        scale = self._update.short_window_scale()
        if scale is None:
            return False
        self._complete(scale=scale)
        self._conclude()
        self._inner_step(None)
        self._applied()
        return not self._update.overflowed

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `DistributedOptimizerMixin.no_sync`."""
        synced, self._update.syncs = self._update.syncs, False
        try:
            yield
        finally:
            self._update.syncs = synced

    def complete_exchange(self) -> None:
        """Complete an exchange that is under way."""
        if self._update.window.in_round and self._update.completes_window:
            self._finish()
        self._synchronized = False

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The parameters' names, Horovod's for those that the script did not name."""
        return named(self._optimizer, self._names)

    @property
    def sharded(self) -> bool:
        """Each rank updates a shard of the parameters."""
        return self._inner.sharded

    @property
    def shards_state(self) -> bool:
        """Each rank has a shard of the optimizer's state."""
        return self._inner.shards_state

    @property
    def passes(self) -> int:
        """Backward passes per update."""
        return self._update.accumulation.passes

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per update."""
        self._update.set_passes(passes)

    def accumulate_steps(self, steps: int) -> None:
        """Let the next update take this many steps, see `Update.accumulate_steps`."""
        self._update.accumulate_steps(steps)

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes that divide the model over ranks."""
        return self._update.context.mesh.model_axes

    def check_has_state(self, use: str, *, whole: bool) -> None:
        """Raise UsageError if the optimizer object has the state of this rank alone.

        Args:
            use: "copy" or "file": the one that would lack the rest.
            whole: the state of this rank's part of the model is not enough.
        """
        axes = self.model_axes
        if self._inner.shards_state:
            raise UsageError(
                f"the state of this optimizer is sharded over the ranks (zero), and a {use} of it would have none: use "
                "ud.save(path, model, optimizer), or optimizer.state_dict() on every rank"
            )
        if whole and axes:
            raise UsageError(
                f"the model is divided over the ranks ({' and '.join(axes)}), and a {use} of this optimizer would have "
                "the state of this rank's part alone: use ud.save(path, model, optimizer)"
            )

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that the inner step gathers, or None if the optimizer has all of it."""
        return self._inner.state_dict()

    def state_loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Tell the inner step that another state was loaded."""
        self._inner.state_loaded(state_dict)

    def kept_state(self, placements: Mapping[int, Placement]) -> KeepsState | None:
        """Return the part in checkpoints that the inner step brings, or None."""
        return self._inner.kept_state(placements)

    def _check_order(self) -> None:
        if self.skip and self._update.window.in_round:
            raise UsageError(
                "step() inside skip_synchronize(), but synchronize() was not called since backward(): the gradients "
                "are not reduced. Call optimizer.synchronize() before, or step() without skip_synchronize()."
            )
        if self.is_horovods and self._synchronized and not self.skip:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "Horovod exchanges the gradients a second time here; put step() into "
                "`with optimizer.skip_synchronize():`.",
                stacklevel=4,
            )
        self._synchronized = False

    @property
    def _evaluates_once(self) -> bool:
        """Whether a closure is called once, before the step begins.

        Shards are stepped on when the gradients are there; a window takes one evaluation for each pass; and whether a
        scaled gradient has overflowed decides whether there is a step.
        """
        accumulation = self._update.accumulation
        in_window = accumulation.stepwise and accumulation.passes > 1
        return self._inner.sharded or in_window or self._update.scaler is not None

    def _refuse_several_evaluations(self) -> None:
        if needs_closure(self._plain):
            accumulation = self._update.accumulation
            asked = f"accumulate={accumulation.passes}" if accumulation.passes > 1 else "precision=fp16"
            raise UsageError(
                f"{self._plain.__name__} calls the closure several times in a step, and {asked} takes one call for "
                "each backward pass. Leave it out, and compute the loss of the whole batch in the closure"
            )

    def _step_with_closure(self, closure: Callable[[], Any]) -> Any:
        """Let the optimizer call the closure as it likes: each call is exchanged, and returns the mean loss."""
        own: list[Any] = []

        def reduced() -> Any:
            loss = closure()
            own.append(loss)
            self._complete_window()
            if len(own) == 1 and self._update.actors is not None:  # parameters that are new have been agreed on
                self._act_before(self._update.actors)
            self.gradients.unmark_parts()
            self._update.reset_window()
            return self._mean_loss(loss)

        loss = self._plain.step(self._optimizer, reduced)
        self._applied()
        return own[0] if self.is_horovods and own else loss

    def _mean_loss(self, loss: Any) -> Any:
        """Average the loss over the ranks: an optimizer that looks at it must decide the same everywhere."""
        if loss is None or self._update.is_local:
            return loss  # None on every rank: a closure that returns nothing
        value = torch.as_tensor(loss).detach().to("cpu", torch.float64, copy=True).reshape(1)
        self._announcements.announce_loss()
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
        if grad_scaler is not None and self._cut and not self._inner.sharded:
            unscale(self._optimizer, grad_scaler)  # while parts are marked: all ranks must find the same overflows
        self.gradients.unmark_parts()
        if self._update.actors is not None:
            self._act_before(self._update.actors)
        return self._inner.step(grad_scaler)

    def _act_before(self, actors: Actors) -> None:
        update = self._update
        if actors.wanted_before(update.step + 1):
            actors.act_before(update.step + 1, update.trained)

    def _applied(self) -> None:
        self.gradients.finish_queued = self._is_concluded = False
        self._sparse.clear()
        if self._update.overflowed:
            self._update.reset_window()
            return
        update = self._update
        if update.actors is not None and update.actors.wanted_after(update.step + 1):
            update.actors.act_after(update.step + 1, update.trained)
        update.applied()

    # On behalf of the others, after this rank has joined

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
        self.gradients.clear()
        self._complete(scale=scale, is_joined=True)
        self._conclude()
        if self._update.overflowed:
            self._inner.skip()
        else:
            self._inner.take_part()
        self.gradients.clear()
        self._is_concluded = False
        self._update.reset_window()

    # The exchange

    def _end_extra_pass(self) -> None:
        """Complete the exchange of an earlier backward pass before the same step. Collective."""
        self._announcements.announce_end_of_extra_pass()
        self._update.end_extra_pass()

    def _priority(self) -> int:
        """Return what the first of the ranks that have not joined has most of."""
        update = self._update
        rank = 0 if self._buffers is None else update.context.axis_rank(update.options.gradient_axis)
        return _LAST_RANK + 1 - min(rank, _LAST_RANK)

    def _complete_window(self) -> None:
        """Complete the exchange, if backward did not, and conclude it. Collective."""
        if not self._update.window.finished:
            self._finish()
        self._conclude()

    def _finish(self) -> None:
        """Complete the exchange and give every parameter its reduced gradient. Collective."""
        self._announcements.announce_update()
        self._complete(scale=None)

    def _complete(self, *, scale: float | None, is_joined: bool = False) -> None:
        gradients = self.gradients
        gradients.add_hooks()
        is_shared = self._update.shares_notice
        changed, buffers_changed, first = self._finish_from(0, scale, is_joined)
        if changed:  # on some rank something is trained that was not agreed on
            gradients.changed = False
            known = len(gradients.parameters)
            gradients.agree()
            if len(gradients.parameters) > known:
                self._finish_from(known, scale, is_joined)
        self._sparse.exchange(gradients.parameters, scale=self._update.whole_scale(scale))
        self._sparse.make_sparse(gradients.parameters)
        gradients.exchanged()
        gradients.mark_parts()
        if self._buffers is not None and is_shared:
            self._buffers.exchange(buffers_changed, root=_LAST_RANK + 1 - first, is_joined=is_joined)
        self._is_concluded = False

    def _conclude(self) -> None:
        """Post-process the reduced gradients of the window, once: unscale, check for overflow, clip. Collective."""
        if self._is_concluded:
            return
        self._is_concluded = True
        gradients = self.gradients
        if self._update.rules is not None:
            gradients.take_changed()
        self._update.conclude(self._sparse.reduced(gradients.parameters))
        gradients.refresh_sparse()
        gradients.mark_parts()
        if self._tuner is not None and self._tuner.due():
            self._retune(self._tuner)

    def _retune(self, tuner: autotune.Tuner) -> None:
        """Use the bucket size that rank 0 wants to try, or to keep. Collective."""
        is_first = self._update.communicator.rank == 0
        choice: autotune.Choice = self._sparse.gather(tuner.next_choice() if is_first else None)[0]
        if autotune.apply(choice, self._update):
            self.gradients.make_views(0)
        tuner.restart()
        if choice.final:
            self._tuner = None

    def _finish_from(self, first: int, scale: float | None, is_joined: bool) -> bytes:
        """Complete the exchange of the parameters from number `first` on; returns the largest flags of all ranks."""
        self.gradients.take_unhooked(first)
        buffers = 0 if self._buffers is None or is_joined else self._buffers.notice()
        present, flags = self._update.finish(
            flags=bytes((self.gradients.changed, buffers, 0 if is_joined else self._priority())),
            scale=scale,
            first_parameter=first,
            is_joined=is_joined,
        )
        dense = self._sparse.as_dense
        self._inner.take(
            first,
            [
                None if not (is_present or dense) and self._sparse.agreed(index) else is_present
                for index, is_present in enumerate(present, start=first)
            ],
        )
        return flags
