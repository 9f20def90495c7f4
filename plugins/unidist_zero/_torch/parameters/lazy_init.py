"""Lazy initialization at stage 3 on PyTorch: a model built on the `meta` device gets its values unit by unit.

Each rank runs the initializers of all modules, as it would have when building the model, in one unit's memory at a
time; rank 0's values count, and each rank keeps its shard of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch

from unidist.errors import UsageError
from unidist_torch.models.lazy_init import BUILT_AS
from unidist_torch.operations.functions import broadcast_parameters
from unidist_zero._torch.parameters.fsdp_units import Unit, Units

INIT = "_unidist_init"
"""The attribute of a model that holds what `init_with` was given."""

Initializer = Callable[[torch.nn.Module], Any]


class DeferredModel:
    """A model without values, until it has them.

    Args:
        model: some of its tensors are on the meta device. Afterwards none is: parameters are the same objects, on
            torch's default device and with arbitrary values; `Units` gives them their memory later.

    Raises:
        UsageError: a module that cannot initialize its tensors; names it.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        device = torch.get_default_device()
        if device.type == "meta":
            raise UsageError(
                "distribute() within `with torch.device('meta')`: build the model there, and leave the block before"
            )
        self._model = model
        self._has_function = INIT in vars(model)
        self._function: Initializer | None = vars(model).pop(INIT, None)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._helped = self._find_modules()
        for parameter in list(model.parameters()):
            if parameter.is_meta:
                _move(parameter, device)
        self._buffers = _give_buffers(model, device)
        self._set: set[int] = set()  # parameters that have their values

    def initialize(self, units: Units) -> None:
        """Give all tensors rank 0's values, and free all parameter memory but the shards. Collective."""
        own = None if self._has_function and self._function is None else _run_own
        self._walk(units, Unit.fill, own, is_last=self._function is None)
        if self._function is not None:
            self._walk(units, Unit.gather_for_writing, self._function, is_last=True)
        broadcast_parameters(dict(self._model.named_buffers()))
        for parameter in self._model.parameters():
            if hasattr(parameter, BUILT_AS):
                delattr(parameter, BUILT_AS)

    def _walk(
        self, units: Units, open_unit: Callable[[Unit], None], initializer: Initializer | None, *, is_last: bool
    ) -> None:
        """Run an initializer on all modules, children first, as `Module.apply` does.

        Args:
            units: of the model. The root unit stays gathered, each of the others while its modules are visited.
            open_unit: allocates a unit's memory.
            initializer: called with each module; None: values are loaded later.
            is_last: no later initializer could still set values.
        """
        checks = is_last and initializer is not None
        unit_of = {id(module): unit for unit in reversed(units.units[1:]) for module in unit.module.modules()}
        with self._opened(units.root, open_unit, checks):
            for key, modules in groupby(_children_first(self._model), lambda module: unit_of.get(id(module))):
                if key is None:
                    for module in modules:
                        self._initialize(module, initializer, checks)
                    continue
                with self._opened(key, open_unit, checks):
                    for module in modules:
                        self._initialize(module, initializer, checks)

    @contextmanager
    def _opened(self, unit: Unit, open_unit: Callable[[Unit], None], checks: bool) -> Iterator[None]:
        open_unit(unit)
        with _in_built_types(unit):
            yield
        if checks:
            self._check_set(unit)
        broadcast_parameters([(self._names[key], parameter) for key, parameter in unit.parameters.items()])
        unit.release()

    def _initialize(self, module: torch.nn.Module, initializer: Initializer | None, checks: bool) -> None:
        if initializer is None or (initializer is _run_own and id(module) not in self._helped):
            return
        own = dict(module.named_parameters(recurse=False))
        kept = {}
        if initializer is _run_own:  # what was built with values keeps them, or those that its first module gave it
            kept = {
                name: each.detach().clone()
                for name, each in own.items()
                if id(each) in self._set or not hasattr(each, BUILT_AS)
            }
        with torch.no_grad():
            initializer(module)
            for name, value in kept.items():
                own[name].copy_(value)
        self._set.update(map(id, own.values()))
        for name, parameter in own.items():
            if module._parameters.get(name) is not parameter:
                raise UsageError(
                    f"the initialiser of {type(module).__name__} put another parameter in the place of {name!r}, which "
                    "the optimizer holds; write to it in place (torch.nn.init)"
                )
        if checks:
            self._check_buffers(module)

    # What nothing has given values

    def _find_modules(self) -> set[int]:
        """Return the identities of the modules that have tensors without memory."""
        found = set()
        for path, module in self._model.named_modules():
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            names = [name for name, tensor in tensors if tensor.is_meta]
            if names:
                found.add(id(module))
            if names and not self._has_function and _own_initializer(module) is None:
                raise UsageError(
                    f"the model was built without memory, and its module {path or 'itself'!r} "
                    f"({type(module).__name__}) has {', '.join(names)} but no method reset_parameters() to give "
                    "values. Add one that sets them in place, or say how with unidist_zero.init_with(model, function); "
                    "buffers may also be made with device='cpu'"
                )
        return found

    def _check_set(self, unit: Unit) -> None:
        for key, parameter in unit.parameters.items():
            if hasattr(parameter, BUILT_AS) and _can_be_nan(parameter) and bool(parameter.isnan().any()):
                raise UsageError(
                    f"parameter {self._names[key]!r} of a model that was built without memory has NaN after its "
                    "module's reset_parameters(), and the function of init_with() if there is one: it was not set, or "
                    "not all of it"
                )

    def _check_buffers(self, module: torch.nn.Module) -> None:
        for name, buffer in module.named_buffers(recurse=False):
            noted = self._buffers.get(id(buffer))
            if noted is None:
                continue
            unset = bool(buffer.isnan().any()) if _can_be_nan(buffer) else buffer._version == noted[1]
            if unset:
                raise UsageError(
                    f"buffer {name!r} of {type(module).__name__}, which was built without memory, was not set by its "
                    "module's reset_parameters() nor by the function of init_with(). Set it there, or make it with "
                    "device='cpu'"
                )


def has_deferred(model: torch.nn.Module) -> bool:
    """Return whether some tensors of a model have no memory."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def init_with(model: torch.nn.Module, function: Initializer | None) -> None:
    """See `unidist_zero.init_with`."""
    if not has_deferred(model):
        raise UsageError(
            "init_with(): the model has its values already. Build it within `with torch.device('meta')`, or let "
            "model.apply(function) do it"
        )
    vars(model)[INIT] = function


def _own_initializer(module: torch.nn.Module) -> Callable[[], Any] | None:
    for name in ("reset_parameters", "_reset_parameters"):  # the latter: torch.nn.MultiheadAttention
        method = getattr(module, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]  # of any module
    return None


def _run_own(module: torch.nn.Module) -> None:
    """Let a module initialize its tensors."""
    method = _own_initializer(module)
    if method is not None:
        method()


def _children_first(module: torch.nn.Module, seen: set[int] | None = None) -> Iterator[torch.nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


@contextmanager
def _in_built_types(unit: Unit) -> Iterator[None]:
    """Give the parameters the types that the script built them in: random numbers of 16 bits are coarse."""
    places = []
    for parameter in unit.parameters.values():
        dtype = getattr(parameter, BUILT_AS, parameter.dtype)
        if dtype != parameter.dtype:
            places.append((parameter, parameter.data))
            parameter.data = parameter.data.to(dtype)
    yield
    for parameter, place in places:
        place.copy_(parameter.detach())
        parameter.data = place


def _move(parameter: torch.nn.Parameter, device: torch.device) -> None:
    """Take a parameter off the meta device; it stays the object that the optimizer and tied modules refer to.

    On the CPU, memory that is never written takes none; elsewhere one element stands for all.
    """
    if device.type == "cpu":
        data = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
    else:
        data = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
    moved = torch.nn.Parameter(data, requires_grad=parameter.requires_grad)
    moved.__dict__.update(parameter.__dict__)
    moved.__class__ = type(parameter)
    # Assigning to `data` is refused for another kind of device.
    torch.utils.swap_tensors(parameter, moved)  # type: ignore[no-untyped-call]  # of torch


def _give_buffers(model: torch.nn.Module, device: torch.device) -> dict[int, tuple[torch.Tensor, int]]:
    """Allocate buffers; returns those that had no memory, with their version counters, by identity."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                if id(buffer) not in made:
                    made[id(buffer)] = new = torch.zeros_like(buffer, device=device)
                    if _can_be_nan(new):
                        new.fill_(float("nan"))
                module._buffers[name] = made[id(buffer)]
    return {id(buffer): (buffer, buffer._version) for buffer in made.values()}


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
