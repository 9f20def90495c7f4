"""What plugins register: named specs with lazy import paths, so that listing them imports nothing heavy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from unidist.buffer import HOST
from unidist.errors import PluginError, unknown_choice

if TYPE_CHECKING:
    from unidist.engine import Engine
    from unidist.framework import Framework
    from unidist.gradients.compression import GradientCompressor
    from unidist.launcher import Launcher
    from unidist.strategy.interface import Strategy


@dataclass(frozen=True)
class EngineSpec:
    """An engine, not yet imported.

    Args:
        name: the word in `--engine`.
        path: "module:Class" of an `unidist.engine.Engine`.
        summary: one line for lists.
        memory_kinds: kinds of memory that it moves ("host", "cuda"), known without importing it.
        priority: `--engine auto` takes the usable engine with the highest; below 0 it is never taken unasked.
        re_forms: after the loss of a rank the others can close it, and connect again in the same process: what elastic
            jobs need.
    """

    name: str
    path: str
    summary: str
    memory_kinds: frozenset[str] = frozenset((HOST,))
    priority: int = 0
    re_forms: bool = False

    def load(self) -> Engine:
        """Import the class and return a new engine."""
        engine: Engine = _load(self.path, f"engine {self.name!r}")()
        return engine


@dataclass(frozen=True)
class FrameworkSpec:
    """A framework adapter, not yet imported.

    Args:
        name: short name ("torch").
        path: "module:Class" of an `unidist.framework.Framework`.
        requires: the package that must be installed, by import name.
        summary: one line for lists.
        conformance: module with the adapter's half of `unidist.testing.StrategyConformance`; "" if it has none.
        exports: what checkpoints can be turned into: `(suffix, "module:function")`, see `unidist.checkpoint.convert`.
        imports: what can be turned into one: `(file in the folder, "module:function")`, see there.
    """

    name: str
    path: str
    requires: str
    summary: str
    conformance: str = ""
    exports: tuple[tuple[str, str], ...] = ()
    imports: tuple[tuple[str, str], ...] = ()

    def load(self) -> Framework:
        """Import the class and return a new adapter."""
        framework: Framework = _load(self.path, f"framework {self.name!r}")()
        return framework


@dataclass(frozen=True)
class StrategyType:
    """A kind of strategy, not yet imported.

    Args:
        name: the word in `--strategy`.
        path: "module:Class" of an `unidist.strategy.interface.Strategy` dataclass.
        summary: one line for lists.
    """

    name: str
    path: str
    summary: str

    def load(self) -> type[Strategy]:
        """Import and return the class."""
        strategy: type[Strategy] = _load(self.path, f"strategy {self.name!r}")
        return strategy


@dataclass(frozen=True)
class LauncherSpec:
    """A launcher, not yet imported: `path` is "module:Class" of an `unidist.launcher.Launcher`.

    `marker` is a variable whose presence says that this process runs where the launcher belongs, as in an allocation
    of a scheduler: it is then taken unless the user names hosts, or another launcher.
    """

    name: str
    path: str
    summary: str
    marker: str = ""

    def load(self) -> Launcher:
        """Import the class and return a new launcher."""
        launcher: Launcher = _load(self.path, f"launcher {self.name!r}")()
        return launcher


@dataclass(frozen=True)
class CompressorSpec:
    """A gradient compressor, not yet imported: `path` is "module:Class" of an `unidist.gradients.compression.GradientCompressor`.

    Its module is loaded by the launcher too, to check options, so it imports neither a framework nor numpy at the top.
    """

    name: str
    path: str
    summary: str

    def load(self) -> type[GradientCompressor]:
        """Import and return the class."""
        compressor: type[GradientCompressor] = _load(self.path, f"compression {self.name!r}")
        return compressor


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule of pipeline parallelism, not yet imported.

    Args:
        name: the word in `schedule=`.
        path: "module:function"; the function takes a `PipelineSize` and returns a `Schedule`, both of
            `unidist_pipeline.schedules.model`. Its module is loaded by the launcher too: it imports no framework and no
            numpy at the top.
        summary: one line for lists.
        stages_per_rank: stages on each rank if the user says nothing.
    """

    name: str
    path: str
    summary: str
    stages_per_rank: int = 1

    def load(self) -> object:
        """Import and return the function; the plugin of pipelines, which calls it, checks that it is one."""
        return _load(self.path, f"schedule {self.name!r}")


class Spec(Protocol):
    """What a registry holds: anything with a name and a one-line summary."""

    @property
    def name(self) -> str:
        """The word by which users ask for it."""

    @property
    def summary(self) -> str:
        """One line for lists."""


S = TypeVar("S", bound=Spec)


class Registry(Generic[S]):
    """The specs of one kind, by name.

    Args:
        kind: what is registered here, in words, for messages ("engine").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._specs: dict[str, S] = {}
        self._origins: dict[str, str] = {}
        self.origin = "unknown"
        """The plugin that is registering right now; set by the plugin manager around each hook call."""

    def add(self, spec: S) -> None:
        """Register `spec`.

        Raises:
            PluginError: the name is taken; names both plugins. The first one keeps it.
        """
        if spec.name in self._specs:
            raise PluginError(
                f"{self.kind} {spec.name!r} of plugin {self.origin} is already registered by plugin "
                f"{self._origins[spec.name]}. Rename one, or switch one off with `-p no:PLUGIN`."
            )
        self._specs[spec.name] = spec
        self._origins[spec.name] = self.origin

    def get(self, name: str, *, hint: str = "") -> S:
        """Return the spec called `name`, or raise ConfigurationError that lists the choices."""
        if name not in self._specs:
            raise unknown_choice(self.kind, name, self._specs, hint=hint)
        return self._specs[name]

    def origin_of(self, name: str) -> str:
        """Return the name of the plugin that registered `name`."""
        return self._origins[name]

    def __iter__(self) -> Iterator[S]:
        return iter(self._specs.values())

    def __len__(self) -> int:
        return len(self._specs)

    def __contains__(self, name: object) -> bool:
        return name in self._specs


def load_function(path: str, what: str) -> Callable[..., object]:
    """Import "module:function", of `what` in messages, and return the function."""
    return _load(path, what)


def _load(path: str, what: str) -> type:
    module_name, _, attribute = path.partition(":")
    try:
        loaded: type = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as exc:
        raise PluginError(
            f"{what} cannot be loaded from {path!r}: {exc}. Reinstall the plugin, or fix its path."
        ) from exc
    return loaded
