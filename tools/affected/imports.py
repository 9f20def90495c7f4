"""A file depends on what it imports, and a module that loads plugins on those of its own package."""

from __future__ import annotations

from collections.abc import Iterator

from tools.affected.graph import Link
from tools.affected.sources import PRODUCT, Sources
from tools.affected.subjects import LOADERS

MANAGER = "PluginManager"
"""The class that loads plugins. Whoever asks for it may get any; what tests use of those, they name."""


def import_links(sources: Sources) -> Iterator[Link]:
    """Yield the links of all imports in Python files."""
    packages = {module.path: module.package for module in sources.project.modules.values()}
    for path, mentions in sources.mentions.items():
        for item in mentions.imports:
            # What an `__init__` imports only when somebody asks for it is linked to who asks.
            if item.at_import or not mentions.is_lazy:
                yield from imported(sources, path, item.module, item.name)
        loads = any(item.name == MANAGER for item in mentions.imports)
        for plugin in sorted(sources.project.entry_modules):
            if plugin in LOADERS.get(path, ()) or (loads and plugin.partition(".")[0] == packages.get(path)):
                yield from (Link(path, target, f"loads {plugin}") for target in sources.module(plugin))


def imported(sources: Sources, path: str, module: str, name: str = "") -> Iterator[Link]:
    """Yield the links of a file that imports a module, or a name of it."""
    modules = sources.project.modules
    reason = f"imports {module}"
    if module.partition(".")[0] in sources.project.packages:
        yield from (Link(path, target, reason) for target in sources.module(module, name))
        if not name and module in modules and sources.mentions[modules[module].path].is_lazy:
            lazy = modules[module]
            for item in lazy.imports:  # any of its names may be used
                if not item.at_import and (lazy.is_facade or item.package == lazy.package):
                    yield from imported(sources, path, item.module, item.name)
    elif not path.startswith(PRODUCT):
        yield from (Link(path, target, reason) for target in sources.beside(path, module, name))
