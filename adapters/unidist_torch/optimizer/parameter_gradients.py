"""The parameters of one bound optimizer, and the way of their gradients into the buckets.

Gradients are written to engine memory by post-accumulate hooks, and `p.grad` becomes a view of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from unidist.buffer import HOST
from unidist.errors import UsageError
from unidist.gradients.buckets import ParameterInfo
from unidist.optim.update import Update
from unidist.training.agreement import Description, check_equal, sparse_anywhere, trained_anywhere
from unidist_torch.allocator import keep_freed_memory
from unidist_torch.cuda_graphs import refuse_capture
from unidist_torch.gradients.parameters import describe
from unidist_torch.gradients.partial_gradient import PartialGradient, PartNorms, partial_gradient, plain_part
from unidist_torch.gradients.placeholder import ShardedGradient, sharded_gradient
from unidist_torch.gradients.sparse import SparseGradients
from unidist_torch.memory import digest_of, dtype_of, memory_kind
from unidist_torch.models import plain_use
from unidist_torch.optimizer.bucket_views import BucketView, make_bucket_view
from unidist_torch.optimizer.inner_step import InnerStep


class ParameterGradients:
    """The gradients of one bound optimizer on this rank, until they are exchanged.

    Args:
        optimizer: whose parameters these are.
        names: of parameters by identity, where known.
        update: counts passes, and has the buckets.
        inner: told of new parameters and bucket views.
        sparse: takes the gradients that are sparse.
        finish: completes the exchange, at the end of a backward pass. Collective.
        end_extra_pass: completes the exchange of an earlier backward pass before the same step. Collective.
        cut: identities of the parameters of which this rank has a part, and the norms of their gradients.

    Attributes:
        parameters: those that are exchanged, as numbered by the `Update`.
        changed: this rank trains a parameter that was not agreed on.
        finish_queued: the exchange is completed when the backward pass under way ends.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        *,
        update: Update,
        inner: InnerStep,
        sparse: SparseGradients,
        finish: Callable[[], None],
        end_extra_pass: Callable[[], None],
        cut: Mapping[int, PartNorms],
    ) -> None:
        self.parameters: list[torch.Tensor] = []
        self.changed = False
        self.finish_queued = False
        self._hooked: set[int] = set()  # parameters whose gradient the last pass of the window has computed
        self._optimizer = optimizer
        self._names = names
        self._update = update
        self._inner = inner
        self._sparse = sparse
        self._finish = finish
        self._recorder = update.context.recorder
        self._end_extra_pass = end_extra_pass
        self._is_reduced = False  # the shown gradients are
        self._cut = cut
        self._shows = not inner.sharded
        self._views: list[BucketView] = []
        self._index: dict[int, int] = {}
        self._digests: dict[str, bytes] | None = None
        self._hooks: list[Any] = []
        self._more_hooks: list[Any] = []

    def agree(self) -> None:
        """Agree with the other ranks on the parameters; new ones get a bucket view and a hook. Collective."""
        self._inner.before_agreement()
        listed = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        described = tuple(
            describe(parameter, position, self._names, sparse=self._sparse.pending(self._index.get(id(parameter), -1)))
            for position, parameter in enumerate(listed)
        )
        choices = f"{self._update.options}, {'mean' if self._update.average else 'sum'} over the ranks"
        everyone: list[Description] = self._sparse.gather(Description(choices, described))
        check_equal(everyone, self._sparse.members, self._update.context.topology.rank)
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
                self._update.check_dense(described[position].name)
                self._sparse.agree(known)
        new = [new[number] for number in self._update.in_groups([described[position].name for position, _ in new])]
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
        first = len(self.parameters)
        self._update.add_parameters(infos)
        if any(info.memory == HOST for info in infos):
            keep_freed_memory()
        for index, (_, parameter) in enumerate(new, start=first):
            self.parameters.append(parameter)
            self._index[id(parameter)] = index
        self.make_views(first)
        self.add_hooks()

    def make_views(self, first: int) -> None:
        """Make bucket views for the gradients of the parameters from number `first` on."""
        del self._views[first:]
        for index in range(first, len(self.parameters)):
            self._views.append(make_bucket_view(self._update, index, self.parameters[index]))
        self._inner.parameters_changed(self.parameters, first, [view.tensor for view in self._views])

    def add_hooks(self) -> None:
        """Hook every parameter that can have a gradient and has no hook yet; notice those without a bucket view.

        The trained parameters may change during training: layers are unfrozen, groups are added.
        """
        with plain_use():
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad and id(parameter) not in self._index:
                        self.changed = True
        self._hooks += [None] * (len(self.parameters) - len(self._hooks))
        for index, parameter in enumerate(self.parameters):
            if self._hooks[index] is None and parameter.requires_grad:
                self._hooks[index] = parameter.register_post_accumulate_grad_hook(self._make_hook(index))
                if self._shows and self._update.in_backward and not self._update.repeats_unchanged:
                    self._more_hooks.append(parameter.register_hook(self._make_hook_before_accumulation()))

    def take_computed(self, parameter: torch.Tensor) -> None:
        """Take a gradient that did not come from autograd's own accumulation, see `step_runner.gradient_computed`."""
        index = self._index.get(id(parameter))
        if index is None:
            self.changed = True  # it is agreed on when the round is complete, which finds the gradient
        else:
            self._take(index, parameter)

    def memory(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return where the gradient of this pass may be computed, see `step_runner.gradient_memory`."""
        index = self._index.get(id(parameter))
        if index is None or self._digests is not None or self._update.has_gradient(index):
            return None
        return self._views[index].tensor

    @contextmanager
    def digesting(self) -> Iterator[dict[str, bytes]]:
        """Take the gradients of the passes within the block away, and exchange none.

        Yields:
            A digest of each, by the parameter's name, as it is computed; complete after the block.
        """
        found: dict[str, bytes] = {}
        self._digests = found
        try:
            yield found
        finally:
            self._digests = None

    def _digest(self, index: int, parameter: torch.Tensor, found: dict[str, bytes]) -> None:
        with plain_use():
            gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, "it was just computed"
        found[f"the gradient of {self._update.parameters[index].name!r}"] = digest_of(gradient)

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        """Bring a gradient that was just computed into its bucket, and report it to the update."""
        if self._digests is not None:
            self._digest(index, parameter, self._digests)
            return
        with plain_use():
            gradient = parameter.grad
        added = isinstance(gradient, ShardedGradient)  # the script keeps what an earlier pass has left
        if isinstance(gradient, ShardedGradient):
            gradient = gradient.added
        assert gradient is not None
        update = self._update
        if not update.window.in_round:
            refuse_capture("backward() of a model whose gradients are exchanged", parameter)
        if update.in_backward and not self.finish_queued:
            self._queue_finish()
        if update.is_repeated(index):
            if not (added or update.accumulation.passes > 1):
                self._refuse_dropped(index)
            self._end_extra_pass()
        if gradient.layout is not torch.strided:
            if not self._sparse.agreed(index):
                self.changed = True
            if not self._sparse.as_dense:
                if self._inner.sharded:
                    self._refuse_sparse(index)
                self._take_sparse(index, parameter, gradient)
                return
            gradient = self._sparse.densify(index, gradient)
        is_last = update.window.is_last_pass(index)
        if is_last:
            self._hooked.add(index)
        view = self._views[index]
        if not view.holds(gradient):
            # Within a window p.grad is None between passes; else None says that the script has dropped the gradient.
            if update.has_gradient(index) and (added or update.accumulation.passes > 1):
                view.add(gradient)
            else:
                view.copy(gradient)
        # Before the last pass of a window the script must not see half a sum: it might clip it.
        with plain_use():
            if is_last:
                parameter.grad = view.tensor if self._shows else sharded_gradient(parameter)
            else:
                parameter.grad = None
        if self._recorder.timeline is not None:
            self._recorder.begin("backward", again=False)
        update.gradient_ready(index)

    def _queue_finish(self) -> None:
        """Complete the exchange when this backward pass ends, if it is the last of its window.

        Clipping waits for the step: another backward pass may add to the gradients before.
        """
        if self._update.completes_window and self._update.syncs:
            self.finish_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_queued)

    def _finish_queued(self) -> None:
        self.finish_queued = False
        self._finish()

    def take_set_by_hand(self) -> None:
        """Take gradients that no hook has seen, of a pass that is not the last of its window.

        There the others are in their buckets, and `p.grad` is None.
        """
        for index, parameter in enumerate(self.parameters):
            with plain_use():
                is_there = parameter.grad is not None
            if is_there:
                self._take(index, parameter)

    def take_unhooked(self, first: int) -> None:
        """Take gradients that no hook has seen: set by hand, or kept from an earlier update."""
        accumulation = self._update.accumulation
        in_window = accumulation.stepwise and accumulation.passes > 1
        for index in range(first, len(self.parameters)):
            with plain_use():
                gradient = self.parameters[index].grad
            if gradient is None or isinstance(gradient, ShardedGradient):
                continue
            adds = self._update.has_gradient(index)  # there are earlier passes, or a hook has brought this one
            if adds and (not in_window or index in self._hooked):
                continue
            if gradient.layout is not torch.strided:
                if not self._sparse.as_dense:
                    continue
                gradient = gradient.to_dense()
            if adds:
                self._views[index].add(gradient)
            elif not self._views[index].holds(gradient):
                self._views[index].copy(gradient)
            self._update.accumulate(index)
            if not self._shows:
                self.parameters[index].grad = None  # its shard will be elsewhere

    def take_changed(self) -> None:
        """Bring what the script has put in the place of a reduced gradient to its bucket, or zeros if it dropped it."""
        if not self._shows:
            return
        for index, parameter in enumerate(self.parameters):
            with plain_use():
                view, gradient = self._views[index], parameter.grad
            if view.tensor is None or self._sparse.agreed(index) or (gradient is not None and view.holds(gradient)):
                continue
            if gradient is None:
                view.tensor.zero_()
            else:
                view.copy(gradient)
                parameter.grad = view.tensor

    def exchanged(self) -> None:
        """Note that the gradients are reduced."""
        self._is_reduced = True
        self._hooked.clear()

    def _prepare_to_add(self) -> None:
        """Scale reduced gradients, before autograd adds those of another pass, for the exchange of both."""
        self._is_reduced = False
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                if parameter.grad is not None:
                    parameter.grad.mul_(self._update.repeat_factor(index))

    def refresh_sparse(self) -> None:
        """Show sparse gradients that travelled as dense ones as their buckets hold them now, made sparse again."""
        if self._sparse.as_dense:
            for index, parameter in enumerate(self.parameters):
                if self._sparse.agreed(index) and parameter.grad is not None:
                    parameter.grad = self._views[index].tensor if self._shows else sharded_gradient(parameter)
            self._sparse.make_sparse(self.parameters)

    def mark_parts(self) -> None:
        """Let the script see which reduced gradients are parts, see `PartialGradient`."""
        with plain_use():
            for parameter in self.parameters if self._cut and self._shows else ():
                gradient, norms = parameter.grad, self._cut.get(id(parameter))
                if norms is not None and gradient is not None and gradient.layout is torch.strided:
                    parameter.grad = partial_gradient(gradient, norms)

    def unmark_parts(self) -> None:
        """Undo `mark_parts`, for the inner optimizer."""
        with plain_use():
            for parameter in self.parameters if self._cut else ():
                if isinstance(parameter.grad, PartialGradient):
                    parameter.grad = plain_part(parameter.grad)

    def clear(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self.parameters:
            parameter.grad = None

    def close(self) -> None:
        """Remove the hooks, and drop the gradients."""
        for hook in (*self._hooks, *self._more_hooks):
            if hook is not None:
                hook.remove()
        self.clear()

    def _make_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        owner = weakref.ref(self)  # Python's collector does not see through a parameter's hooks

        def hook(parameter: torch.Tensor) -> None:
            gradients = owner()
            if gradients is not None:
                gradients._take(index, parameter)

        return hook

    def _make_hook_before_accumulation(self) -> Callable[[torch.Tensor], None]:
        owner = weakref.ref(self)

        def hook(gradient: torch.Tensor) -> None:
            gradients = owner()
            if gradients is not None and gradients._is_reduced:
                gradients._prepare_to_add()

        return hook

    def _refuse_dropped(self, index: int) -> None:
        raise UsageError(
            f"p.grad of {self._update.parameters[index].name!r} was set to None after a backward pass that is "
            "exchanged already, and the strategy shards gradients: its shards cannot be dropped so. To drop the "
            "gradients of a pass call optimizer.zero_grad(), on every rank"
        )

    def _refuse_sparse(self, index: int) -> None:
        raise UsageError(
            f"the gradient of {self._update.parameters[index].name!r} is sparse, and strategies that shard updates "
            "take dense ones. Make the embedding with sparse=False, or bind the optimizer with "
            "DistributedOptimizer(sparse_as_dense=True)"
        )

    def _take_sparse(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._sparse.add(index, gradient)
        if not self._update.window.is_last_pass(index) or self._update.accumulation.passes > 1:
            parameter.grad = None
        self._update.pass_without_buffer(index)
