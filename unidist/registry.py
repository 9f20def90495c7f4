"""Registries of what plugins provide, by name, as specs whose classes are imported when they are used."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from unidist.errors import PluginError, UnidistError, unknown_choice

__all__ = ["Registry", "Spec", "load_object"]


class Spec(Protocol):
    """An entry of a registry. Each kind of plugin has its own spec class, beside its interface.

    Attributes:
        kind: of the registered things, in one word, for messages: "engine".
        hook: the hook by which plugins register it: "unidist_register_engines".
    """

    kind: ClassVar[str]
    hook: ClassVar[str]

    @property
    def name(self) -> str:
        """The name by which users choose it."""

    @property
    def summary(self) -> str:
        """One line for lists."""


S = TypeVar("S", bound=Spec)


class Registry(Generic[S]):
    """The specs of one kind, by name.

    Args:
        kind: of the registered things, in words, for messages ("engine").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._specs: dict[str, S] = {}
        self._origins: dict[str, str] = {}
        self.origin = "unknown"
        """The plugin that is registering at present; set by the plugin manager around each hook call."""

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


def load_object(path: str, what: str) -> Any:
    """Import "module:name" and return what it names.

    Args:
        path: "module:name".
        what: the thing in messages: "engine 'shm'".

    Raises:
        PluginError: there is no such module, or no such name in it, or the module raises when it is imported.
    """
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as exc:
        raise PluginError(
            f"{what} cannot be loaded from {path!r}: {exc}. Reinstall the plugin, or fix its path."
        ) from exc
    except (KeyboardInterrupt, UnidistError):
        raise
    except BaseException as exc:  # whatever a foreign module raises at import, SystemExit included
        raise PluginError(
            f"{what} cannot be loaded from {path!r}: {type(exc).__name__}: {exc}. Reinstall the plugin, or mend it."
        ) from exc
