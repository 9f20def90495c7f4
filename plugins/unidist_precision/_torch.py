"""Models of PyTorch: autocast around forward, and loss scaling without changes to the script.

The script computes its loss from the model's outputs, and calls `backward` on it. The gradient is multiplied by the
loss scale where it enters the model, at the outputs, while it is still float32; so the script's loop stays as it is.
Gradients that leave the model at its inputs are divided by it again. A term of the loss that does not come from the
model's outputs (a penalty computed from parameters) is not scaled.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from unidist.buffer import DType
from unidist.errors import UsageError
from unidist.gradients.precision import Precision, is_narrow
from unidist.mixins import with_mixin
from unidist.optim.loss_scaling import LossScaler
from unidist_precision._structure import map_tensors
from unidist_precision.binding import PrecisionBinding
from unidist_torch.models.step_runner import PartOfOutputs
from unidist_torch.operations.differentiable import apply_pair, inside

_TORCH = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}
_PROTOCOL_OF_FILES = torch.serialization.DEFAULT_PROTOCOL
_SEEN = "_unidist_seen_class"
"""If a module has this attribute, the next look at its `__class__` returns the value, and removes it."""


class TorchPrecision(PrecisionBinding):
    """See `PrecisionBinding`."""

    rounds_updates = True

    @override
    def prepare(self, model: torch.nn.Module, precision: Precision) -> torch.nn.Module:
        """See `PrecisionBinding.prepare`.

        The parameters of a module that keeps floating-point buffers (running statistics of a batch normalisation) stay
        float32: its arithmetic wants both of one type.
        """
        if isinstance(model, PrecisionMixin):
            _refuse_second(model, precision)
            return model
        dtypes = {parameter.dtype for parameter in model.parameters()}
        if torch.float32 not in dtypes:
            found = ", ".join(sorted(str(dtype) for dtype in dtypes)) or "none"
            raise UsageError(
                f"strategy 'precision' computes in 16 bits what is float32, but the model's parameters are: {found}. "
                "Leave the strategy out, or make the model float32"
            )
        if "forward" in vars(model):
            raise UsageError(
                f"{type(model).__name__} has a forward of its own on the object (torch.compile does so), around which "
                "autocast cannot be put. Call distribute() first, then torch.compile(model)"
            )
        if is_narrow(precision.parameters):
            for module in model.modules():
                if not any(buffer.is_floating_point() for buffer in module.buffers(recurse=False)):
                    _narrow(module, _TORCH[precision.parameters])
        return model

    @override
    def attach(self, model: torch.nn.Module, compute: DType, scaler: LossScaler | None) -> Callable[[], str]:
        """See `PrecisionBinding.attach`. The model and its modules stay the objects they are, of subclasses.

        A script may call modules of the model instead of the model (`training_step` of a LightningModule,
        `encode_image`), so each of them computes in 16 bits when it is called from outside of the model's forward.
        """
        if isinstance(model, PrecisionMixin):
            return model._unidist_precision.report  # of several optimizers, each binds the model
        around = _Around(_TORCH[compute], scaler)
        part = _AroundPart(around)
        classes: dict[type, type] = {}  # modules of one class keep one class: torch.compile looks at it
        for module in _callable_parts(model):
            plain = type(module)
            if plain not in classes:
                classes[plain] = _part_class(plain)
            module.__class__ = classes[plain]
            module.__dict__["_unidist_precision"] = part
        plain = type(model)

        @functools.wraps(plain.forward)  # for scripts that look at the arguments, as Hugging Face's Trainer does
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            inner = functools.partial(plain.forward, self)
            return self._unidist_precision.call(self, inner, args, kwargs)

        model.__class__ = with_mixin(plain, PrecisionMixin, forward=forward)
        model.__dict__["_unidist_precision"] = around
        around.kind = plain.__name__
        return around.report


def _refuse_second(model: torch.nn.Module, precision: Precision) -> None:
    """Raise UsageError if a model that computes in 16 bits cannot have another optimizer."""
    if precision.scaling is None and not is_narrow(precision.parameters):
        return
    why = (
        "each optimizer would scale its loss, which is one"
        if precision.scaling is not None
        else "its parameters are 16 bits wide already, and the other optimizer has the 32"
    )
    raise UsageError(
        f"this model ({type(model).__mro__[2].__name__}), or a model that it is a part of, is distributed already, and "
        f"precision takes one optimizer here: {why}. Call distribute() once, with one optimizer that has several "
        "parameter groups, or use precision=bf16 without zero"
    )


def _callable_parts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the modules in the model that have parameters and that the script may call by itself.

    Not those whose class is special to torch (compiled by torch.jit, parametrized): modules in them are found. And not
    those that compute a parametrized parameter: it is read outside of forward, too.
    """
    own = {id(part) for part in model.modules() if is_parametrized(part) for part in _with_parametrizations(part)}
    return [
        module
        for module in model.modules()
        if module is not model
        and id(module) not in own
        and not isinstance(module, (PrecisionMixin, torch.jit.ScriptModule))
        and next(module.parameters(), None) is not None
    ]


def _with_parametrizations(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    yield module
    yield from module.get_submodule("parametrizations").modules()


def _part_class(plain: type[Any]) -> type[Any]:
    """Return the class of a part. It replaces `__call__`, and leaves `forward` as the module defines it."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._unidist_precision.call(self, functools.partial(plain.__call__, self), args, kwargs)

    return with_mixin(plain, PrecisionMixin, __call__=call)


def _class_of(module: Any) -> type[Any]:
    seen: type[Any] | None = module.__dict__.pop(_SEEN, None)
    return seen or type(module)


def _set_class(module: Any, kind: type[Any]) -> None:
    vars(object)["__class__"].__set__(module, kind)


class PrecisionMixin:
    """Methods added to the classes of the model and its modules. Never instantiated; see `attach`."""

    _unidist_precision: _Around | _AroundPart
    __class__ = property(_class_of, _set_class)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy as the plain module: a copy computes in the types of its parameters.

        In files of `torch.save` the module is made as any plain one is, so that `torch.load(weights_only=True)` takes
        them; for that pickle has to see its plain class.
        """
        plain = type(self).__mro__[2]
        state = self.__getstate__()
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name not in ("_unidist_precision", _SEEN)}
        if protocol != _PROTOCOL_OF_FILES:
            return plain.__new__, (plain,), state
        self.__dict__[_SEEN] = plain
        return copyreg.__newobj__, (plain,), state  # type: ignore[attr-defined]  # no stub has it


class _Around:
    """Runs the model's forward with autocast and loss scaling.

    Args:
        compute: the type of operations that may use 16 bits.
        scaler: of the loss, or None.

    Attributes:
        compute: as above.
        is_inside: forward is running.
        was_called: the model, or a module in it, has computed something.
        kind: name of the model's class.
    """

    def __init__(self, compute: torch.dtype, scaler: LossScaler | None) -> None:
        self.compute = compute
        self.is_inside = False
        self.was_called = False
        self.kind = "the model"
        self._scaler = scaler

    @property
    def scaler(self) -> LossScaler | None:
        """The scaler, if gradients of outputs are to be multiplied now."""
        scaler = self._scaler if torch.is_grad_enabled() else None
        return scaler if scaler is not None and scaler.on_outputs else None

    def report(self) -> str:
        """Say what did not compute in 16 bits, or nothing."""
        if self.was_called:
            return ""
        return (
            f"neither {self.kind} nor a module in it was called, so nothing was computed in 16 bits. Call the model, "
            "or its modules, in place of their forward, and let it hold all that should compute in 16 bits"
        )

    def run(self, device: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what forward returns under autocast, as it is."""
        self.is_inside = True
        self.was_called = True
        try:
            with torch.autocast(device, self.compute):
                return forward(*args, **kwargs)
        finally:
            self.is_inside = False

    def widened(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an output in at least 32 bits."""
        return tensor.float() if tensor.dtype == self.compute else tensor

    def call(self, model: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what forward returns, its floating-point tensors in at least 32 bits."""
        if self.is_inside:
            return forward(*args, **kwargs)  # the model calls itself: what flows back in there is scaled already
        scaler = self.scaler
        if scaler is not None:
            args, kwargs = map_tensors(lambda tensor: _unscaled(tensor, scaler), torch.is_tensor, (args, kwargs))
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        outputs = self.run(device, forward, args, kwargs)
        if isinstance(outputs, PartOfOutputs):
            return outputs  # of a pipeline: types and scale stay as they are until the last stage
        found: list[torch.Tensor] = []

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            if scaler is None or not tensor.requires_grad:
                return self.widened(tensor)
            found.append(tensor)
            return _scaled(tensor, scaler)

        changed = map_tensors(change, torch.is_tensor, outputs)
        if scaler is not None and not found and model.training and any(p.requires_grad for p in model.parameters()):
            raise UsageError(
                f"{type(model).__name__} returned {type(outputs).__name__}, in which precision=fp16 found no tensor to "
                "train from: the loss cannot be scaled. Return tensors, tuples, dicts or dataclasses of them, or use "
                "precision=bf16"
            )
        return changed


class _AroundPart:
    """Calls a module in the model with autocast, where no forward around it runs with it.

    Args:
        model: of the whole model.
    """

    def __init__(self, model: _Around) -> None:
        self._model = model
        self.report = model.report

    def call(self, module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what forward returns; called from outside, its floating-point tensors in at least 32 bits."""
        if self._model.is_inside:
            return forward(*args, **kwargs)
        device = next(parameter.device.type for parameter in module.parameters())
        if torch.is_autocast_enabled(device):  # of the script, or activations that are computed a second time
            return forward(*args, **kwargs)
        outputs = self._model.run(device, forward, args, kwargs)
        refuses = self._model.scaler is not None

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if refuses and tensor.requires_grad:
                raise UsageError(
                    f"precision=fp16 scales the gradients of what the distributed model returns, and the script called "
                    f"{type(module).__name__}, a module in it, from outside of its forward. Call the model itself, or "
                    "use precision=bf16"
                )
            return self._model.widened(tensor)

        return map_tensors(change, torch.is_tensor, outputs)


def _narrow(module: torch.nn.Module, dtype: torch.dtype) -> None:
    for parameter in module.parameters(recurse=False):
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(dtype)


# The script sees gradients unscaled, and what flows back from a loss that it computes from them (a gradient penalty) is
# scaled by the loss's own scale: it passes as it is.


def _scaled(tensor: torch.Tensor, scaler: LossScaler) -> torch.Tensor:
    """Return the tensor in at least 32 bits; its gradient is multiplied by the scale before it is rounded to 16."""
    wide = torch.promote_types(tensor.dtype, torch.float32)

    def multiplied(gradient: torch.Tensor) -> torch.Tensor:
        scaler.was_applied = True
        return (gradient * scaler.scale).to(tensor.dtype)

    return inside(tensor, lambda value: apply_pair(value, lambda given: _same(given).to(wide), multiplied))


def _unscaled(tensor: torch.Tensor, scaler: LossScaler) -> torch.Tensor:
    """Return the tensor; its gradient is divided by the scale."""
    if not (tensor.is_floating_point() and tensor.requires_grad):
        return tensor
    return inside(tensor, lambda value: apply_pair(value, _same, lambda gradient: gradient / scaler.scale))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)
