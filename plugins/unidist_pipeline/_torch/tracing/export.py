"""A PyTorch model as a list of operations by `torch.export`, for models that `torch.fx` cannot trace.

The model's code runs on an example without values, so control flow may depend on sizes, arguments of any number and
plain Python; only not on values. All modules are traced, down to PyTorch's own operations, and a stage may begin at
each of them. The parameters stay those of the model: operations look them up by their paths when they run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from unidist.errors import ConfigurationError, UsageError
from unidist_pipeline._torch.tracing.fx import Forward, call_with, may_look_into
from unidist_pipeline._torch.tracing.graph_rewriter import INSIDE, GraphRewriter
from unidist_pipeline._torch.tracing.program import Program
from unidist_pipeline._torch.tracing.structures import ValueIndex
from unidist_pipeline._torch.tracing.values import PLAIN, changed, constant, form_of, tensors_in

_MOST_FORMS = 32
"""Kinds of arguments whose operations are kept."""


@dataclass(frozen=True, eq=False)
class Exported:
    """The operations for one kind of arguments.

    Args:
        graph: the operations; they find parameters in the model by their paths.
        changes: paths of the buffers that they change.
        guards: conditions on sizes of arguments, in Python with `L['leaves']` for the tensors of the arguments; None:
            unknown, so only the sizes of the example are admitted.
        sizes: first dims of the tensors of the example.
    """

    graph: fx.Graph
    changes: frozenset[str]
    guards: tuple[str, ...] | None
    sizes: tuple[int, ...]

    def admits(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Return whether it is valid for tensors that differ from the example's in their first dims at most."""
        sizes = _first_dims(leaves)
        if sizes == self.sizes:
            return True
        # Sizes of 0 and 1 are others: what is broadcast or empty takes other ways.
        if self.guards is None or min(sizes) < 2:
            return False
        try:
            return all(eval(guard, {}, {"L": {"leaves": leaves}}) for guard in self.guards)
        except Exception:  # whatever a guard needs that is not here: then the model is exported again
            return False

    def check_changes(self, program: Program) -> None:
        """Raise ConfigurationError if stages share a buffer that one of them changes."""
        for path in sorted(self.changes):
            stages = [stage.number for stage in program.stages if path in stage.attributes()]
            if len(stages) > 1:
                raise ConfigurationError(
                    f"pipeline: the model changes {path!r} while it runs, and uses it in stages "
                    f"{' and '.join(map(str, stages))}, which would each have their own. Name split points so that "
                    "one stage uses it"
                )


@dataclass(frozen=True)
class _Form:
    """A parameter or buffer, without its values.

    Args:
        module: that has it.
        name: of it there.
        like: on the meta device.
        device: of the tensor.
        trained: it requires a gradient; None: it is a buffer.
        same: equal for those that are one tensor.
    """

    module: torch.nn.Module
    name: str
    like: torch.Tensor
    device: torch.device
    trained: bool | None
    same: int


class ExportCache:
    """The operations of a model, for each kind of arguments seen so far.

    Args:
        model: whole, not divided yet. Its shapes and types are recorded, so that it can be traced when it is divided.
        forward: of its class.
    """

    def __init__(self, model: torch.nn.Module, forward: Forward) -> None:
        self._forward = forward
        self._forms = [
            _Form(module, name, _without_memory(tensor), tensor.device, trained, id(tensor))
            for module in model.modules()
            for name, tensor, trained in [
                *((name, each, each.requires_grad) for name, each in module._parameters.items() if each is not None),
                *((name, each, None) for name, each in module._buffers.items() if each is not None),
            ]
        ]
        self._found: dict[Hashable, list[Exported]] = {}

    def of(self, model: torch.nn.Module, arguments: Mapping[str, Any], num_samples: int) -> Exported:
        """Return the operations for some arguments: the same on all ranks for arguments of the same form.

        Args:
            model: the same, whole or divided; its modes count.
            arguments: of its forward, by name.
            num_samples: the first dim of tensors that is that long may be longer or shorter the next time.

        Raises:
            ConfigurationError: the export would lose a part of the model's behaviour.
            Exception: of any kind: the model cannot be traced.
        """
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        leaves = tensors_in(arguments)
        key = _arguments_form(arguments, num_samples), tuple(module.training for module in model.modules())
        found = self._found.setdefault(key, [])
        for each in found:
            if each.admits(leaves):
                return each
        _check_modules(model)
        with self._without_values(), _no_functions_of_their_own(), _plainly(leaves):
            try:
                made = _exported(model, self._forward, arguments, num_samples)
            except Exception as error:
                if num_samples < 2 or isinstance(error, ConfigurationError | GuardOnDataDependentSymNode):
                    raise
                made = _exported(model, self._forward, arguments, 0)  # for this number of samples alone
        found.append(made)
        if len(self._found) > _MOST_FORMS:
            del self._found[next(iter(self._found))]
        return made

    @contextmanager
    def _without_values(self) -> Iterator[None]:
        """Within the block the model has all of its parameters and buffers, none of them with values."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        before = [(each, getattr(each.module, each.name)) for each in self._forms]
        made: dict[int, torch.Tensor] = {}
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        try:
            for form in self._forms:
                if form.same not in made:
                    like = form.like
                    with mode:
                        empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=form.device)
                    trained = form.trained
                    made[form.same] = empty if trained is None else torch.nn.Parameter(empty, requires_grad=trained)
                setattr(form.module, form.name, made[form.same])  # as scripts do: recurrent layers want to know
            yield
        finally:
            for form, tensor in before:
                setattr(form.module, form.name, tensor)


class _Capture(torch.nn.Module):
    """Runs a model on its tensors; records the structure that it returns, and returns its tensors and sizes."""

    def __init__(self, model: torch.nn.Module, run: Callable[[list[torch.Tensor]], list[Any]]) -> None:
        super().__init__()
        setattr(self, INSIDE, model)
        self.training = model.training
        self._run = run

    def forward(self, leaves: list[torch.Tensor]) -> list[Any]:
        return self._run(leaves)


def _exported(model: torch.nn.Module, forward: Forward, arguments: Mapping[str, Any], num_samples: int) -> Exported:
    """Trace a model that has no values; `num_samples` of 0: for the sizes of these arguments alone."""
    leaves = [torch.empty_like(leaf) for leaf in tensors_in(arguments)]  # no views: sizes of what is viewed would count
    told: dict[str, Any] = {}

    def run(given: list[torch.Tensor]) -> list[Any]:
        rest = iter(given)
        whole = changed(lambda item: next(rest) if isinstance(item, torch.Tensor) else item, arguments)
        numbered: list[Any] = []

        def take(item: Any) -> Any:
            if not isinstance(item, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
                if not isinstance(item, PLAIN):
                    raise UsageError(
                        f"what the model returns is or contains {type(item).__module__}.{type(item).__qualname__}; "
                        "return tensors, numbers and strings, in tuples, lists, dicts and dataclasses"
                    )
                return item
            numbered.append(item)
            return ValueIndex(len(numbered) - 1)

        before = _buffers(model)
        told["structure"] = changed(take, call_with(forward, model, whole))
        for path, buffer in _buffers(model).items():
            if buffer is not before.get(path):
                raise ConfigurationError(
                    f"the model puts another tensor into {path!r} while it runs; change the one that is there: add_(), "
                    "copy_()"
                )
        return numbered

    varies = [bool(num_samples > 1 and leaf.dim() and leaf.shape[0] == num_samples) for leaf in leaves]
    program = torch.export.export(
        _Capture(model, run),
        (leaves,),
        dynamic_shapes=([{0: torch.export.Dim.AUTO} if each else None for each in varies],),
        strict=False,
    )
    guards = getattr(program, "_guards_code", None) if num_samples else None
    graph, changes = GraphRewriter(program, arguments, told["structure"]).rewrite()
    return Exported(graph, changes, None if guards is None else tuple(guards), _first_dims(leaves))


def _arguments_form(arguments: Mapping[str, Any], num_samples: int) -> Hashable:
    """Return the form of arguments: equal if they differ in the number of samples only."""

    def describe(item: Any) -> Hashable:
        if not isinstance(item, torch.Tensor):
            return constant(item, "an argument of the model")
        varies = num_samples > 1 and item.dim() and item.shape[0] == num_samples
        return str(item.dtype), "samples" if varies else "", tuple(item.shape[1:] if varies else item.shape)

    return form_of(dict(arguments), describe)


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        f"{path}.{name}".lstrip("."): each
        for path, part in model.named_modules()
        for name, each in part._buffers.items()
    }


def _first_dims(leaves: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(leaf.shape[0] for leaf in leaves if leaf.dim())


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _check_modules(model: torch.nn.Module) -> None:
    for path, module in model.named_modules():
        if path and not may_look_into(module):
            raise ConfigurationError(
                f"{path!r} has hooks or a forward of its own on the object (activations= gives it one), which "
                "torch.export would not keep. Leave them out"
            )


@contextmanager
def _no_functions_of_their_own() -> Iterator[None]:
    """Within the block, autograd functions that define a backward pass are errors: the export would lose it."""
    from torch.autograd.function import Function

    plain, thread = vars(Function)["apply"], threading.get_ident()

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return plain.__get__(None, cls)(*args, **kwargs)
        raise ConfigurationError(
            f"the model uses {cls.__module__}.{cls.__qualname__}, which has a backward pass of its own, and "
            "torch.export would not keep it"
        )

    setattr(Function, "apply", classmethod(refuse))  # noqa: B010  # a method that is put back
    try:
        yield
    finally:
        setattr(Function, "apply", plain)  # noqa: B010


@contextmanager
def _plainly(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within the block, nothing of the caller's modes gets into the operations."""
    kinds = sorted({leaf.device.type for leaf in leaves})
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
