"""Horovod's `DistributedOptimizer(op=Adasum)`: it combines the changes of the parameters instead of gradients.

Each rank steps on its own gradients; what this changed in a parameter is combined by Adasum (Maleki et al. 2020,
https://arxiv.org/abs/2006.02924), parameter by parameter, and added to where the parameter was before.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from unidist.errors import ExtraPassError
from unidist.mixins import with_mixin
from unidist.optim.accumulation import Accumulation
from unidist.runtime_api import RuntimeAPI
from unidist_torch.gradients.compression import TensorCompressor
from unidist_torch.operations.reductions import Adasum, allreduce_async_
from unidist_torch.optimizer.grad_scaler import scaled_step
from unidist_torch.optimizer.horovod_arguments import named
from unidist_torch.optimizer.mixin import check_plain, rewrap

_numbers = itertools.count()


class AdasumOptimizerMixin:
    """Methods that `bind_adasum` adds to an optimizer. Never instantiated by itself."""

    _unidist: AdasumBinding
    _step_supports_amp_scaling = True

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Step on this rank's gradients, and combine the changes of all ranks.

        Args:
            closure: called once, before the step, to compute the loss and the gradients.
            grad_scaler: given by torch's GradScaler; a rank whose gradients overflowed contributes no change.
        """
        return self._unidist.step(closure, grad_scaler)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self._unidist.zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Do nothing, for scripts that call it: gradients are not exchanged."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError, as in Horovod."""
        raise AssertionError("skip_synchronize is not supported with op=Adasum: there is no exchange to be skipped")

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return self._unidist.names  # of Horovod's attribute, which scripts read

    @property
    def backward_passes_per_step(self) -> int:
        """Backward passes that make one update."""
        return self._unidist.accumulation.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Let an update take `passes` backward passes from now on."""
        self._unidist.accumulation = Accumulation(passes, average=False, stepwise=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does; the next update begins afresh."""
        self._unidist.reset()
        super().load_state_dict(state_dict)  # type: ignore[misc]  # of the torch optimizer

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the plain optimizer: its binding to this process stays here."""
        plain = type(self).__mro__[2]
        return plain.__new__, (plain,), self.__getstate__()


def bind_adasum(
    optimizer: torch.optim.Optimizer,
    context: RuntimeAPI,
    *,
    names: Mapping[str, torch.Tensor] | None,
    compression: TensorCompressor,
    passes: int,
) -> Any:
    """Make `optimizer` an Adasum optimizer and return it.

    Args:
        optimizer: of torch.
        context: the runtime.
        names: of its parameters, where known; ranks match by them.
        compression: of the changes.
        passes: backward passes per update; their gradients are summed.
    """
    check_plain(optimizer)
    plain = type(optimizer)
    wrapped_step = optimizer.__dict__.pop("step", None)  # a scheduler made earlier has wrapped the plain step
    optimizer.__class__ = with_mixin(plain, AdasumOptimizerMixin)
    accumulation = Accumulation(passes, average=False, stepwise=False)
    binding = AdasumBinding(optimizer, plain, context, accumulation, compression, names or {})
    optimizer._unidist = binding  # type: ignore[attr-defined]
    if wrapped_step is not None:
        rewrap(optimizer)
    return optimizer


class AdasumBinding:
    """The state of one Adasum optimizer.

    Args:
        optimizer: the optimizer, already of its new class.
        plain: its class before.
        context: the runtime.
        accumulation: how many backward passes make an update.
        compression: of the changes.
        names: of parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plain: type[torch.optim.Optimizer],
        context: RuntimeAPI,
        accumulation: Accumulation,
        compression: TensorCompressor,
        names: Mapping[str, torch.Tensor],
    ) -> None:
        self.accumulation = accumulation
        self._optimizer = optimizer
        self._plain = plain
        self._context = context
        self._compression = compression
        self._names = {id(tensor): name for name, tensor in names.items()}
        self._prefix = f"adasum.{next(_numbers)}"
        self._passes: dict[int, int] = {}
        self._steps = 0
        owner = weakref.WeakMethod(self._count)  # Python's collector does not see through a parameter's hooks

        def hook(parameter: torch.Tensor) -> None:
            count = owner()
            if count is not None:
                count(parameter)

        for parameter in self._parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(hook)

    def step(self, closure: Callable[[], Any] | None, grad_scaler: Any) -> Any:
        """Step on this rank's gradients, and combine the changes of all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        with torch.no_grad():
            starts = [parameter.detach().clone() for parameter in trained]
            scaled_step(self._plain.step, self._optimizer, grad_scaler)
            pending = []
            for number, (parameter, start) in enumerate(zip(trained, starts, strict=True)):
                compressed, ctx = self._compression.compress(parameter.detach() - start)
                name = f"{self._prefix}.{self._names.get(id(parameter), number)}"
                pending.append((parameter, start, ctx, allreduce_async_(compressed, name=name, op=Adasum)))
            for parameter, start, ctx, handle in pending:
                parameter.copy_(start + self._compression.decompress(handle.wait(), ctx))
        self.reset()
        self._steps += 1
        self._context.step_applied(self._steps)
        return loss

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """The parameters' names, Horovod's for those that the script did not name."""
        return named(self._optimizer, self._names)

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop the gradients, and the passes of the current update."""
        self.reset()
        self._plain.zero_grad(self._optimizer, set_to_none)

    def reset(self) -> None:
        """Start the current update again, without passes."""
        self._passes.clear()

    def _count(self, parameter: torch.Tensor) -> None:
        passes = self._passes.get(id(parameter), 0) + 1
        if passes > self.accumulation.passes:
            raise ExtraPassError(
                f"gradients were computed {passes} times before step(), but backward_passes_per_step="
                f"{self.accumulation.passes}; increase it to accumulate gradients"
            )
        self._passes[id(parameter)] = passes

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
