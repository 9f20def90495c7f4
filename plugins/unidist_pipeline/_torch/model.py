"""A PyTorch model on one rank of a pipeline, which holds its stages only.

The model stays the same object, of a subclass of its class. Parameters and buffers of other stages are removed: their
modules have None instead, and scripts that ask for a parameter get an `AbsentAttribute`. Paths stay those of the whole
model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from typing_extensions import override

from unidist.buffer import DType
from unidist.checkpoint.format.interface import STATE_ATTRIBUTE, PlacesParameters, placements_of
from unidist.checkpoint.format.pieces import Placement
from unidist.errors import ConfigurationError, UsageError
from unidist.mixins import with_mixin
from unidist_pipeline._torch.absent import AbsentAttribute, nothing_absent, say_absent
from unidist_pipeline._torch.tracing.program import Program
from unidist_torch.models.step_runner import PartOfInputs, PartOfOutputs

Slot = tuple[torch.nn.Module, str, bool]
"""A module, the name of a parameter or buffer of it, and whether it is a parameter."""


class StageCall(PartOfInputs):
    """Argument of a call of the model: run this stage. No dataclass, so that nothing looks for tensors inside."""

    def __init__(
        self, program: Program | None, stage: int, arguments: Mapping[str, Any], received: Sequence[Any]
    ) -> None:
        self.program = program
        self.stage = stage
        self.arguments = arguments
        self.received = received


class PipelineMixin:
    """Methods added to the model's class. Never instantiated; see `divide`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a stage; see `StageCall`."""
        call = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(call, StageCall):
            raise UsageError(
                "this model is divided over the ranks of a pipeline, none of which can run it alone. Train with "
                "step(x, y), and use step.evaluate(x, y) and step.predict(x), on every rank"
            )
        if call.program is None:
            return super().forward(**call.arguments)  # type: ignore[misc]  # of a module
        values = call.program.run(call.stage, self, call.arguments, call.received)  # type: ignore[arg-type]
        if call.stage + 1 < len(call.program.stages):
            return PartOfOutputs(values)
        return values

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: a copy would have some of the stages only."""
        raise UsageError("a model that is divided over a pipeline cannot be copied or pickled; save it with unidist")


class PipelinePlacements(PlacesParameters):
    """Names and holders of a rank's parameters in the whole model.

    Args:
        inner: of the model that was divided.
        names: for each path the first of the same parameter in the whole model.
        holders: for each path how many ranks of the pipeline hold the parameter.
    """

    def __init__(self, inner: PlacesParameters, names: Mapping[str, str], holders: Mapping[str, int]) -> None:
        self._inner = inner
        self._names = names
        self._holders = holders

    @override
    def placement(self, path: str, shape: Sequence[int], dtype: DType) -> Placement:
        return self._inner.placement(self._names.get(path, path), shape, dtype)

    @override
    def copies(self, path: str) -> int:
        return self._inner.copies(self._names.get(path, path)) * self._holders.get(path, 1)

    @override
    def gradient_axis(self, path: str) -> str:
        return self._inner.gradient_axis(self._names.get(path, path))

    @override
    def cut_axis(self, path: str) -> str | None:
        return self._inner.cut_axis(self._names.get(path, path))


class Division:
    """Assigns parameters and buffers of a model to stages.

    Args:
        model: whole.
        uses: for each stage the paths of the modules, parameters and buffers that it uses.
        placement: for each stage the rank of the pipeline that has it.

    Attributes:
        shared: parameters that several ranks hold: the ranks, by the first path of the parameter.
        stage_of_paths: for each path of a parameter or buffer the stages that use it.
    """

    def __init__(self, model: torch.nn.Module, uses: Sequence[Collection[str]], placement: Sequence[int]) -> None:
        self._slots: dict[str, Slot] = {}
        first: dict[int, str] = {}
        self.names: dict[str, str] = {}
        self.stage_of_paths: dict[str, tuple[int, ...]] = {}
        tensors: dict[str, list[int]] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, tensor, is_parameter in _own(module):
                path = f"{prefix}.{name}" if prefix else name
                self._slots[path] = (module, name, is_parameter)
                self.names[path] = first.setdefault(id(tensor), path)
                stages = [number for number, used in enumerate(uses) if _uses(used, path)]
                self.stage_of_paths[path] = tuple(stages)
                tensors.setdefault(self.names[path], []).extend(stages)
        for path, stages_of_path in self.stage_of_paths.items():
            if not stages_of_path:  # by this name; used by nobody at all: the first stage keeps it
                self.stage_of_paths[path] = tuple(sorted(set(tensors[self.names[path]]) or {0}))
        for path, name in self.names.items():
            tensors[name] = sorted({*tensors[name], *self.stage_of_paths[path]})
        ranks = {name: sorted({placement[stage] for stage in stages}) for name, stages in tensors.items()}
        self.shared = {name: held for name, held in ranks.items() if len(held) > 1 and self._slots[name][2]}
        self.stages_of = tensors
        self._placement = placement
        self._holders = {path: len(ranks[name]) for path, name in self.names.items()}
        self._check_statistics(model, uses)

    def apply(self, model: torch.nn.Module, stages: Sequence[int]) -> RemovedTensors:
        """Remove the parameters and buffers of other ranks' stages from the model; returns them.

        Args:
            model: the same; afterwards it carries `PipelinePlacements`.
            stages: of this rank.
        """
        own = set(stages)
        places = PipelinePlacements(placements_of(model), self.names, self._holders)
        gone: dict[int, list[tuple[Slot, torch.Tensor]]] = {}
        for path, (module, name, is_parameter) in self._slots.items():
            if not own & set(self.stage_of_paths[path]):
                registered = _registered(module, is_parameter)
                tensor = registered[name]
                if tensor is not None:  # a module with two names is met twice
                    stand_in = torch.empty_like(tensor, device="meta")
                    if is_parameter:
                        stand_in = torch.nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
                    gone.setdefault(id(module), []).append(((module, name, is_parameter), stand_in))
                    if not self._held_by_other_name(module, name, own):
                        registered[name] = None
        plain = type(model)
        model.__class__ = with_mixin(plain, PipelineMixin)
        model.__dict__[STATE_ATTRIBUTE] = places
        rank = self._placement[stages[0]]
        for path, slot in self._slots.items():
            module, name, is_parameter = slot
            if is_parameter and _is_gone(slot):
                say_absent(module, name, AbsentAttribute(path, self._where(path), rank))
        return RemovedTensors([item for items in gone.values() for item in items if _is_gone(item[0])])

    def _where(self, path: str) -> str:
        stages = self.stage_of_paths[path]
        ranks = sorted({self._placement[stage] for stage in stages})
        return (
            f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}, "
            f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))} of the pipeline"
        )

    def _held_by_other_name(self, module: torch.nn.Module, name: str, own: set[int]) -> bool:
        """Return whether the same module has another path, which this rank uses."""
        return any(
            slot[0] is module and slot[1] == name and own & set(self.stage_of_paths[path])
            for path, slot in self._slots.items()
        )

    def _check_statistics(self, model: torch.nn.Module, uses: Sequence[Collection[str]]) -> None:
        for path, module in model.named_modules():
            if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.track_running_stats:
                stages = [number for number, used in enumerate(uses) if _uses(used, f"{path}.running_mean")]
                if len(stages) > 1:
                    raise ConfigurationError(
                        f"pipeline: {path!r} keeps running statistics and is used in stages "
                        f"{' and '.join(map(str, stages))}, which would each have their own. Name split points so "
                        "that one stage uses it, or give it track_running_stats=False"
                    )


class RemovedTensors:
    """Shapes and types of the tensors that were removed from a model.

    Args:
        slots: with tensors on the meta device.
    """

    def __init__(self, slots: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        self._slots = slots

    @contextmanager
    def with_placeholders(self) -> Iterator[None]:
        """Within the block the model has all of its parameters and buffers, those of other ranks without values."""
        with self.unsaid():
            for (module, name, is_parameter), tensor in self._slots:
                _registered(module, is_parameter)[name] = tensor
            try:
                yield
            finally:
                for (module, name, is_parameter), _ in self._slots:
                    _registered(module, is_parameter)[name] = None

    def unsaid(self) -> AbstractContextManager[None]:
        """Within the block modules have None for the parameters of other ranks."""
        return nothing_absent([module for (module, _, is_parameter), _ in self._slots if is_parameter])


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for registered, is_parameter in ((module._parameters, True), (module._buffers, False)):
        for name, tensor in registered.items():
            if tensor is not None:
                yield name, tensor, is_parameter


def _uses(used: Collection[str], path: str) -> bool:
    """Return whether a stage uses the parameter or buffer at a path: itself, or a module that it belongs to."""
    if path in used:
        return True
    while path:
        path = path.rpartition(".")[0]
        if path and path in used:
            return True
    return False


def _is_gone(slot: Slot) -> bool:
    module, name, is_parameter = slot
    return _registered(module, is_parameter).get(name) is None


def _registered(module: torch.nn.Module, is_parameter: bool) -> dict[str, Any]:
    return module._parameters if is_parameter else module._buffers
