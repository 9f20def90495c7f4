"""FSDP units at stage 3: parts of a model whose parameters are in memory only while the part computes.

A unit is gathered before its forward and before its backward, and released after each. Parameters outside of all units
belong to the *root* unit, which stays gathered from the beginning of the model's forward to the end of the backward
pass. Whenever a unit is gathered, the next ones are prefetched, as many as asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NoReturn

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from unidist.errors import ConfigurationError, UsageError
from unidist.waits import calling
from unidist_zero._torch.parameters.gathered_bucket import BucketState, GatheredBucket


class Unit:
    """Parameters that are gathered together.

    Args:
        name: path of its module.
        module: its forward needs the parameters.
        parameters: by identity; one that several units use belongs to the root.
        is_root: see the module's text.
    """

    def __init__(
        self, name: str, module: torch.nn.Module, parameters: Mapping[int, torch.Tensor], *, is_root: bool
    ) -> None:
        self.name = name
        self.module = module
        self.parameters = parameters
        self.is_root = is_root
        self.buckets: list[GatheredBucket] = []
        self.stays = False  # until the next step: nothing tells when its backward comes
        self.depth = 0  # of calls of its forward, which a recursive model nests

    @property
    def is_there(self) -> bool:
        """True: some of it is in memory."""
        return any(bucket.state is not BucketState.ABSENT for bucket in self.buckets)

    def start_gather(self) -> None:
        """Start to gather."""
        for bucket in self.buckets:
            bucket.start_gather()

    def fill(self) -> None:
        """Make the parameters of a model built without memory views of the buckets, see `GatheredBucket.fill`."""
        for bucket in self.buckets:
            bucket.fill()

    def gather_for_writing(self) -> None:
        """Gather; every rank may then write the same values."""
        for bucket in self.buckets:
            bucket.gather_for_writing()

    def gather(self, *, lends: bool = False) -> None:
        """Return when all parameters have their values; see `GatheredBucket.finish_gather`."""
        with calling(f"a pass through {self.name or 'the model'}"):
            self.start_gather()
            for bucket in self.buckets:
                bucket.finish_gather(lends=lends)

    def release(self, *, spares_views: bool = False) -> None:
        """Free the memory; see `GatheredBucket.release`."""
        for bucket in self.buckets:
            bucket.release(spares_views=spares_views)


class Units:
    """The units of one model, and the hooks that gather and release them.

    Args:
        model: the whole model.
        patterns: see `find_units`.
        num_ahead: units to prefetch, 0 or more.
    """

    def __init__(self, model: torch.nn.Module, patterns: Sequence[str] | None = None, *, num_ahead: int = 1) -> None:
        self.model = model
        self.num_ahead = num_ahead
        self.units = find_units(model, patterns)
        self.root = self.units[0]
        self.of_parameter = {key: unit for unit in self.units for key in unit.parameters}
        self._called: list[Unit] = []  # the units that were called before in this forward, the latest last
        self._next: dict[str, Unit] = {}  # which unit was called after which, last time
        self._returning: Any = WeakTensorKeyDictionary()  # the units that return a tensor, or precede one that does
        self._in_backward = False
        self._derived_again = False  # gradients were computed with a graph (create_graph), which uses what was gathered
        self.paused = False  # everything is there, and stays
        for unit in self.units:
            unit.module.register_forward_pre_hook(_Hook(self._before_forward(unit)), prepend=True)
            unit.module.register_forward_hook(_Hook(self._after_forward(unit)), always_call=True)

    def gather(self) -> None:
        """Gather everything. Collective."""
        for unit in self.units:
            unit.gather()

    def release(self, *, spares_views: bool = False) -> None:
        """Free everything but the shards; see `GatheredBucket.release`."""
        for unit in self.units:
            unit.stays = False
            unit.release(spares_views=spares_views)
        self._called = []
        self._derived_again = False

    def abandon(self) -> None:
        """Drop all buckets and the progress of the step: the ranks that held the other shards are gone."""
        for unit in self.units:
            for bucket in unit.buckets:
                bucket.abandon()
            unit.buckets = []
            unit.stays, unit.depth = False, 0
        self._called, self._next = [], {}  # which ranks that come now do not know either
        self._in_backward = self._derived_again = self.paused = False

    @property
    def nbytes_held(self) -> int:
        """Bytes of whole parameters that are in memory now."""
        return sum(bucket.nbytes_held for unit in self.units for bucket in unit.buckets)

    # Hooks

    def _before_forward(self, unit: Unit) -> Any:
        def hook(module: torch.nn.Module, args: Any) -> None:
            if module is not unit.module:  # a copy of the module has copies of its hooks
                return
            unit.depth += 1
            if self.paused:
                return
            if unit.is_root:
                self._called = []
            elif not self._in_backward:
                self.root.gather(lends=True)  # a part of the model is called by itself, maybe
            unit.gather(lends=True)
            if self._in_backward or unit.is_root:
                return
            if self._called:
                self._next[self._called[-1].name] = unit
            following = unit
            for _ in range(self.num_ahead):
                following = self._next.get(following.name, unit)
                if following is unit:
                    break
                following.start_gather()

        return hook

    def _after_forward(self, unit: Unit) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            if module is not unit.module:
                return
            unit.depth -= 1
            if self.paused or unit.depth:
                return
            if self._in_backward:  # computed again (activation checkpointing): its backward comes now
                return
            before = self._called[: -self.num_ahead - 1 : -1]  # the latest first
            self._called = [] if unit.is_root else [*self._called, unit][-max(1, self.num_ahead) :]
            hooked = 0
            for tensor in tensors_in(output):
                if tensor.requires_grad and torch.is_grad_enabled():
                    together = self._returning.setdefault(tensor, [])
                    together += [unit, *before]
                    hook = self._before_backward(unit, before, together)
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch
                    hooked += 1
            if torch.is_grad_enabled() and not hooked and any(p.requires_grad for p in unit.parameters.values()):
                unit.stays = True  # an output that cannot be looked into: its backward would not be noticed
            if unit.is_root:
                if not torch.is_grad_enabled():
                    unit.release()
            elif not (unit.stays or self._derived_again):
                unit.release()

        return hook

    def _before_backward(self, unit: Unit, before: Sequence[Unit], together: Sequence[Unit]) -> Any:
        """Return the hook for the gradient of a unit's output.

        Args:
            unit: the unit.
            before: those that were called before it, the latest first: as many as are prefetched.
            together: the units that return this output, whose hooks run one after the other, and those that they
                prefetch. It is the output of the last unit and of the whole model, say, or of a unit that returns what
                it was given.

        Autograd runs nodes in reverse order of creation (on one device), so all units called after this one are done.
        """

        def hook(gradient: torch.Tensor) -> None:
            if torch.is_grad_enabled():
                self._derived_again = True
            if not self._in_backward:
                self._in_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
            for other in self.units:
                if not (other.is_root or other.stays or other in together or self._derived_again):
                    other.release()
            self.root.gather(lends=True)
            unit.gather(lends=True)
            for other in before:
                other.start_gather()

        return hook

    def _after_backward(self) -> None:
        self._in_backward = False
        if not (self._derived_again and torch.is_grad_enabled()):
            self.release()


class _Hook:
    """A hook that a copy of the module shares, and that no file can hold: the parameters are away."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise UsageError(
            "this model is divided over the ranks (zero=3), and torch.save(model) would write no parameters: use "
            "ud.save(path, model), or torch.save(model.state_dict(), path) with the state_dict() of every rank"
        )


def find_units(model: torch.nn.Module, patterns: Sequence[str] | None = None) -> list[Unit]:
    """Return the units of a model, the root first.

    Parameters that several of them use belong to the root, as do all others.

    Args:
        model: the model.
        patterns: paths of the modules that are units, in which `*` stands for any name. Default: the members of the
            ModuleLists, ModuleDicts and Sequentials in which a class repeats, outermost lists first.

    Raises:
        ConfigurationError: a pattern that matches nothing, or units within units.
    """
    modules = dict(_repeated("", model)) if patterns is None else _matching(model, patterns)
    users: dict[int, set[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters():
            users.setdefault(id(parameter), set()).add(name)
    inside = {id(module) for unit in modules.values() for module in unit.modules()}
    outside = {
        id(parameter)
        for module in model.modules()
        if id(module) not in inside
        for parameter in module.parameters(recurse=False)
    }
    units = []
    for name, module in modules.items():
        own = {id(p): p for p in module.parameters() if len(users[id(p)]) == 1 and id(p) not in outside}
        if own:
            units.append(Unit(name, module, own, is_root=False))
    taken = {key for unit in units for key in unit.parameters}
    rest = {id(p): p for p in model.parameters() if id(p) not in taken}
    return [Unit("", model, rest, is_root=True), *units]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module returns: in tuples, lists, dicts and the attributes of plain objects."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(vars(value))


def _repeated(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    children = [(name, child) for name, child in module.named_children() if next(child.parameters(), None) is not None]
    if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.Sequential):
        kinds = [type(child) for _, child in children]
        if len(set(kinds)) < len(kinds):
            yield from ((f"{path}{name}", child) for name, child in children)
            return
    for name, child in children:
        yield from _repeated(f"{path}{name}.", child)


def _matching(model: torch.nn.Module, patterns: Sequence[str]) -> dict[str, torch.nn.Module]:
    """Return the modules that the patterns name, by path, in the order of the model."""
    found: dict[str, torch.nn.Module] = {}
    matched: set[str] = set()
    for path, module in model.named_modules():
        names = path.split(".")
        for pattern in patterns:
            wanted = pattern.split(".")
            if len(wanted) == len(names) and all(map(fnmatchcase, names, wanted)) and path:
                found[path] = module
                matched.add(pattern)
    for pattern in patterns:
        if pattern not in matched:
            some = [path for path, _ in model.named_modules() if path]
            listed = ", ".join(some[:10]) + (", ..." if len(some) > 10 else "")
            raise ConfigurationError(
                f"zero:units={'+'.join(patterns)}: the model has no module {pattern!r}; it has "
                f"{listed or f'none: {type(model).__name__} has no modules in it. Leave units out'}"
            )
    for path in found:
        outer = next((other for other in found if path.startswith(f"{other}.")), None)
        if outer is not None:
            raise ConfigurationError(
                f"zero:units={'+'.join(patterns)}: {path!r} lies in {outer!r}, and both would be units; name one"
            )
    return found
