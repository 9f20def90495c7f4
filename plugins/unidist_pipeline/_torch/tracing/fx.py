"""A PyTorch model as a list of operations, which can be cut before any of the modules that it calls.

The forward methods of the model, and of modules that are looked into, are traced by `torch.fx`; every other module is
one operation, and runs as usual: with its hooks, and with changes that strategies made to it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from typing_extensions import override

from unidist.errors import ConfigurationError, UsageError
from unidist_pipeline._torch.tracing.structures import ArgumentTensor, Assembly, ValueIndex
from unidist_pipeline._torch.tracing.values import PLAIN, changed, constant, form_of, parts_of, tensors_in
from unidist_torch.models import ChangesInputs

_CONSTRUCTORS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")
"""Functions of torch that do not notice by themselves that an argument (a size) stands for a value."""

_FX_STRUCTURES = (tuple, list, dict, fx.immutable_collections.immutable_list, fx.immutable_collections.immutable_dict)
"""Structures that are arguments of operations as they are; they are tuples, lists and dicts again when these run."""

_UNKNOWN = object()

Forward = Callable[..., Any]


def plain_forward(model: torch.nn.Module) -> Forward:
    """Return the forward function of the model's class.

    Raises:
        ConfigurationError: it cannot be traced, because something was put around it.
    """
    if "forward" in vars(model):
        raise ConfigurationError(
            f"{type(model).__name__} has a forward of its own on the object (torch.compile and some libraries do so), "
            "and pipeline cannot look into it. Give TrainStep the plain model"
        )
    before = [hook for hook in model._forward_pre_hooks.values() if not isinstance(hook, ChangesInputs)]
    if before or model._forward_hooks or model._backward_hooks or model._backward_pre_hooks:
        raise ConfigurationError(
            f"{type(model).__name__} has hooks on the whole model, which no rank of a pipeline runs as a whole. Put "
            "them on modules inside of it, or remove them"
        )
    return type(model).forward


def parameters_of(forward: Forward) -> list[inspect.Parameter]:
    """Return the parameters of a forward function, without `self`."""
    return list(inspect.signature(forward).parameters.values())[1:]


def bound_arguments(forward: Forward, inputs: Any) -> dict[str, Any]:
    """Return the arguments of a forward function by name, with their defaults; `*args` and `**kwargs` by theirs.

    Args:
        forward: of a model's class.
        inputs: one value, a tuple of positional arguments, or a mapping of keyword arguments.

    Raises:
        UsageError: they do not fit the model.
    """
    args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else ()
    kwargs: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
    if not isinstance(inputs, tuple | Mapping):
        args = (inputs,)
    try:
        bound = inspect.signature(forward).bind(None, *args, **kwargs)
    except TypeError as error:
        asked = inspect.signature(forward)
        raise UsageError(f"the inputs do not fit the model's forward{asked}: {error}") from None
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])
    for each in parameters_of(forward):
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and not arguments[each.name]:
            del arguments[each.name]
    return arguments


def unnamed(forward: Forward, arguments: Mapping[str, Any]) -> str:
    """Return the parameter that took arguments without names, `*rest` or `**options`; "" if none did."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return next((str(each) for each in parameters_of(forward) if each.kind in variadic and each.name in arguments), "")


def call_with(forward: Forward, model: torch.nn.Module, arguments: Mapping[str, Any]) -> Any:
    """Call a forward function with arguments by name; `*args` and `**kwargs` by theirs, if they are among these."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for each in parameters_of(forward):
        if each.name not in arguments:
            continue
        value = arguments[each.name]
        if each.kind is each.VAR_POSITIONAL:
            args += value
        elif each.kind is each.VAR_KEYWORD:
            kwargs |= value
        elif each.kind is each.KEYWORD_ONLY:
            kwargs[each.name] = value
        else:
            args.append(value)
    return forward(model, *args, **kwargs)


def default_arguments(forward: Forward) -> dict[str, Any]:
    """Return the arguments of a forward function that have a default value, by name."""
    return {each.name: each.default for each in parameters_of(forward) if each.default is not each.empty}


def constants_of(arguments: Mapping[str, Any]) -> Hashable:
    """Return what decides, besides the values of tensors, what a model does with arguments; where they are tensors.

    Raises:
        UsageError: an argument is neither a tensor nor plain data.
    """
    found = []
    for name, value in arguments.items():

        def leaf(item: Any, name: str = name) -> Hashable:
            return "tensor" if isinstance(item, torch.Tensor) else constant(item, f"argument {name!r}")

        found.append((name, form_of(value, leaf)))
    return tuple(found)


def may_look_into(module: torch.nn.Module) -> bool:
    """Return whether calling a module does nothing but run its class's forward."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" not in vars(module) and not any(hooks)


def trace(
    model: torch.nn.Module, forward: Forward, looked_into: Collection[str], arguments: Mapping[str, Any]
) -> fx.Graph:
    """Return the operations of the model, in the order in which they run.

    Args:
        model: the model; parameters that this rank does not hold have placeholders.
        forward: `plain_forward` of it.
        looked_into: paths of the modules, besides the model, whose forward is traced.
        arguments: by name. Their tensors are traced; for everything else the operations are valid as it is here (see
            `constants_of`). Those that are missing are taken for tensors.

    Raises:
        Exception: of any kind: what the model does with values cannot be traced.
    """
    return _Tracer(forward, looked_into, arguments).trace(model)


class _Tracer(fx.Tracer):
    """See `trace`."""

    proxy_buffer_attributes = True

    def __init__(self, forward: Forward, looked_into: Collection[str], arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self._forward = forward
        self._looked_into = looked_into
        self._arguments = arguments

    @override
    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._looked_into

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """See `fx.Tracer.create_args_for_root`; what is no tensor in the arguments is as it is."""
        by_position: list[Any] = []
        by_name: dict[str, Any] = {}
        for each in parameters_of(self._forward):
            if each.kind is each.VAR_POSITIONAL or each.kind is each.VAR_KEYWORD:
                continue
            given = self._given(each.name)
            if each.kind is each.KEYWORD_ONLY:
                by_name[each.name] = given
            else:
                by_position.append(given)
        forward = self._forward

        def call(root: torch.nn.Module) -> Any:
            return forward(root, *by_position, **by_name)

        return call, [self.root]

    def _given(self, name: str) -> Any:
        """Return an argument with traced values in the place of its tensors."""
        argument = self._arguments.get(name, _UNKNOWN)
        if argument is _UNKNOWN or isinstance(argument, torch.Tensor):
            return self.create_proxy("placeholder", name, (), {})
        if not tensors_in(argument):
            return changed(lambda item: item, argument)  # a copy, which the model may change
        whole = self.create_proxy("placeholder", name, (), {})
        places = itertools.count()

        def take(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            return self.create_proxy("call_function", ArgumentTensor(next(places)), (whole,), {})

        return changed(take, argument)

    @override
    def create_arg(self, a: Any) -> Any:
        """See `fx.Tracer.create_arg`; instances of classes that hold values are built again when the stage runs."""
        if type(a) in _FX_STRUCTURES or isinstance(a, fx.Proxy) or parts_of(a) is None:
            return super().create_arg(a)
        taken: list[Any] = []

        def take(item: Any) -> Any:
            if isinstance(item, PLAIN):
                return item
            taken.append(self.create_arg(item))
            return ValueIndex(len(taken) - 1)

        structure = changed(take, a)
        return self.create_node("call_function", Assembly(structure), tuple(taken), {})

    @override
    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with _constructors_follow(self), _buffers_stay(root):
            return super().trace(root, concrete_args)


@contextmanager
def _buffers_stay(model: torch.nn.Module) -> Iterator[None]:
    """Restore the model's buffers after the block; raises ConfigurationError if it was given others."""
    before = [(path, module, dict(module._buffers)) for path, module in model.named_modules()]
    assigned = []
    try:
        yield
    finally:
        for path, module, buffers in before:
            for name, buffer in buffers.items():
                if module._buffers.get(name) is not buffer:
                    assigned.append(f"{path}.{name}" if path else name)
                    module._buffers[name] = buffer
    if assigned:
        raise ConfigurationError(f"the model assigns to {', '.join(assigned)} while it runs")


@contextmanager
def _constructors_follow(tracer: fx.Tracer) -> Iterator[None]:
    """Within the block, `torch.arange` and similar functions take sizes that are traced values."""
    plain = {name: getattr(torch, name) for name in _CONSTRUCTORS}

    def following(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found: list[fx.Proxy] = []
            fx.node.map_aggregate(
                (args, kwargs), lambda item: found.append(item) if isinstance(item, fx.Proxy) else None
            )
            return tracer.create_proxy("call_function", function, args, kwargs) if found else function(*args, **kwargs)

        return call

    for name, function in plain.items():
        setattr(torch, name, following(function))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(torch, name, function)
