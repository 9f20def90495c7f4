"""Binds an update to a torch optimizer: the optimizer stays the same object, its `step` goes through unidist.

The optimizer object keeps its identity, state and class for isinstance; its class is replaced by a subclass
whose `step` and `zero_grad` ask the binding first.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unidist.errors import UsageError
from unidist.mixins import with_mixin
from unidist.optim.update import Update
from unidist.waits import calling
from unidist_torch.composed import sharing_groups
from unidist_torch.models.plain_files import in_no_file
from unidist_torch.optimizer.binding import Binding
from unidist_torch.optimizer.gathered_step import CutTensor

# GradScaler hands itself to `step(grad_scaler=...)`, which is what lets the overflow check see reduced gradients.
warnings.filterwarnings("ignore", message="GradScaler is going to stop passing itself", category=FutureWarning)


class DistributedOptimizerMixin:
    """Methods that `bind` adds to an optimizer. Never instantiated by itself."""

    _unidist: Binding
    _step_supports_amp_scaling = True

    @calling("optimizer.step()")
    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Complete the exchange and update the parameters, or, inside a window of accumulate=N, do nothing.

        Args:
            closure: computes the loss and its gradients, as for any torch optimizer. The loss that the optimizer and
                the script get is the mean over the ranks of the data axis, so that a line search decides the same on
                every rank; a script that called `DistributedOptimizer` gets its own rank's, as in Horovod. Within a
                window of accumulate=N, each call of `step` calls it once, and all but the N-th return this rank's
                loss.
            grad_scaler: given by torch's GradScaler.
        """
        return self._unidist.step(closure, grad_scaler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; inside a window of accumulate=N they are kept.

        Between `backward` and `step` it completes the exchange and discards the result. (Horovod raises
        AssertionError there.)
        """
        self._unidist.zero_grad(set_to_none)

    @calling("optimizer.synchronize()")
    def synchronize(self) -> None:
        """Complete the exchange: afterwards every `p.grad` holds the reduced gradient (to clip it, say).

        Inside a window of accumulate=N it does nothing. Collective.
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

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the backward passes inside this block on this rank; they are exchanged with the next.

            with optimizer.no_sync():
                loss_of(first).backward()
            loss_of(second).backward()  # exchanges the sum of both
            optimizer.step()

        As `DistributedDataParallel.no_sync`, which `model.no_sync` of a distributed model is too. A `step` that comes
        before another backward pass exchanges what there is. Every rank enters it for the same passes. With `zero=2`
        and `zero=3` a rank holds whole gradients meanwhile.
        """
        with self._unidist.no_sync():
            yield

    @calling("optimizer.flush()")
    def flush(self) -> bool:
        """Apply a window of accumulate=N that the end of an epoch cut short; the mean is over its actual passes.

        Every rank calls it, also one whose window is empty.

        Returns:
            Whether there was anything to apply on any rank.
        """
        return self._unidist.flush()

    @calling("optimizer.release()")
    def release(self) -> None:
        """Let go of the parameters: later backward passes are not exchanged for this optimizer, which cannot step.

        For a loop that goes on with another optimizer: `distribute(model, other)` takes the model again, except where
        it is divided (`zero=3`, `tensor`, `pipeline`, `expert`) and with `precision=fp16`. `state_dict()` still works.
        Every rank calls it, between two updates.
        """
        self._unidist.release()

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return self._unidist.names  # of Horovod's attribute, which scripts read

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that make one update."""
        return self._unidist.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Let an update take `passes` backward passes from now on. Between two updates, the same on every rank.

        Raises:
            UsageError: there are gradients that were not applied, or `--strategy accumulate` counts the passes.
        """
        self._unidist.set_passes(passes)

    @calling("optimizer.load_state_dict()")
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does; the next update begins afresh. Every rank first completes an exchange under way."""
        self._unidist.complete_exchange()
        with sharing_groups(self):  # type: ignore[arg-type]  # it is an optimizer
            super().load_state_dict(state_dict)  # type: ignore[misc]  # of the torch optimizer
        self._unidist.state_loaded(state_dict)

    @calling("optimizer.state_dict()")
    def state_dict(self) -> dict[str, Any]:
        """Return state and options as torch does: of all parameters, on every rank.

        If a strategy shards the state over the ranks (`zero`), it is gathered from the first update on: the call is
        then collective. Where the model is divided (`tensor`, `pipeline`, `expert`) it is that of this rank's part,
        but for tensors that are cut and that the optimizer looks at as a whole: their state is whole.
        """
        state = self._unidist.state_dict()
        if state is None:
            state = super().state_dict()  # type: ignore[misc]  # of the torch optimizer
        axes = self._unidist.model_axes
        if axes and not isinstance(state, dict):
            raise UsageError(
                f"the state_dict() of {type(self).__mro__[2].__name__} is no dict, and has the state of this rank's "
                "part of the model alone: use ud.save(path, model, optimizer)"
            )
        return in_no_file(state, axes) if axes else state

    @calling("optimizer.add_param_group()")
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does; they are exchanged from the next update on. The same on every rank.

        Those of layers that are new since `distribute` get rank 0's values; the call is then collective. (Horovod's
        `DistributedOptimizer` copies nothing.)

        Raises:
            UsageError: a pipeline divides the model, and this rank's part of it has not got them.
        """
        super().add_param_group(param_group)  # type: ignore[misc]  # of the torch optimizer
        self._unidist.group_added(self.param_groups[-1]["params"])  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as the plain optimizer: its binding to this process stays here.

        Raises:
            UsageError: its state is sharded over the ranks.
        """
        self._unidist.check_has_state("copy", whole=False)
        plain: Any = type(self).__mro__[2]
        memo[id(self)] = made = plain.__new__(plain)
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain optimizer.

        Raises:
            UsageError: its state is sharded over the ranks, or that of a part of the model.
        """
        self._unidist.check_has_state("file", whole=True)
        plain = type(self).__mro__[2]
        return plain.__new__, (plain,), self.__getstate__()


# torch wraps the `step` of a class in what calls step hooks, unless this says that it did: `load_state_dict` would do
# it here. The plain class's step is wrapped already, and hooks would run twice.
DistributedOptimizerMixin.step.hooked = True  # type: ignore[attr-defined]


def bind(
    optimizer: torch.optim.Optimizer,
    update: Update,
    *,
    names: Mapping[str, torch.Tensor] | None = None,
    cut: Collection[int] = (),
    gathered: Sequence[CutTensor] = (),
) -> Any:
    """Bind `update` to `optimizer` and return it; see `unidist.optim.BindsOptimizers`. Collective.

    Args:
        optimizer: not bound yet.
        update: for it.
        names: paths of parameters, where known.
        cut: identities of the parameters of which this rank has a part.
        gathered: those that the optimizer looks at as a whole.
    """
    check_plain(optimizer)
    plain = type(optimizer)
    wrapped_step = optimizer.__dict__.pop("step", None)  # a scheduler made earlier has wrapped the plain step
    optimizer.__class__ = with_mixin(plain, DistributedOptimizerMixin)
    try:
        optimizer._unidist = Binding(optimizer, plain, update, names, cut, gathered)  # type: ignore[attr-defined]
    except BaseException:  # a rank was lost meanwhile: it may be bound again in the next generation of an elastic job
        optimizer.__class__ = plain
        raise
    if wrapped_step is not None:
        rewrap(optimizer)
    return optimizer


def check_plain(optimizer: object) -> None:
    """Raise UsageError if the optimizer is bound already, or is none."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        found = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        attributes: Mapping[str, Any] = getattr(optimizer, "__dict__", {})
        inner = [name for name, value in attributes.items() if isinstance(value, torch.optim.Optimizer)]
        advice = "Give an object of a class that derives from torch.optim.Optimizer"
        if inner:
            advice = (
                f"It wraps one, in its attribute {inner[0]!r}: give that one, before {found} is made around it. Then "
                f"{found} steps it as before"
            )
        elif isinstance(optimizer, Iterable) and not isinstance(optimizer, str | type):
            advice = "Pass one optimizer per call"
        raise UsageError(f"an optimizer of torch.optim is expected, not {found}. {advice}")
    if hasattr(optimizer, "_unidist"):
        raise UsageError("this optimizer is distributed already; call distribute() or DistributedOptimizer() once")


def rewrap(optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler that was made earlier see the calls of `step`: it looks for these two attributes."""
    bound = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return bound(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
