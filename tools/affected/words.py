"""Plugins register names: a test depends on what is registered by a word of its strings, as in "zero=2,clip_norm=1".

The core's own plugin is left out, and so are the launcher's commands: whatever runs has them. What binds something to a
framework is left out where other frameworks are named, in the file or in what it uses, and that one is not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from tools.affected.declared import Registered, registered
from tools.affected.fixtures import fixture_files
from tools.affected.graph import Link
from tools.affected.sources import PRODUCT, Sources
from tools.affected.strings import named_modules
from tools.layout.project import CORE, Module

_WORD = re.compile(r"(?<![\w./])\w[\w-]*(?![\w/]|\.\w)")
"""A word that is not part of a path or of a dotted name."""
_OPTION = re.compile(r"--[a-z][\w-]+")


def word_links(sources: Sources, links: Iterable[Link]) -> Iterator[Link]:
    """Yield the links of words; `links` are those that were found before.

    Left out are tools, which run nothing, and files with fixtures for all tests, which name what others use.
    """
    for_all = {*fixture_files(sources, "tests/any")}
    paths = [path for path in sources.mentions if not path.startswith((*PRODUCT, "tools/")) and path not in for_all]
    plugins = [(plugin, each) for plugin in _plugins(sources) for each in _registered(sources, plugin)]
    named = {path: {*_frameworks(sources, path, [each for _, each in plugins])} for path in paths}
    used: defaultdict[str, set[str]] = defaultdict(set)
    for link in links:
        if link.target in named and not link.is_alone:
            used[link.path].add(link.target)
    frameworks = set[str]().union(*named.values())
    for path in paths:
        here = set[str]().union(*(named[file] for file in _closure(path, used)))
        words = {item.package for item in sources.mentions[path].imports}
        words.update(
            *(pattern.findall(text) for text in sources.mentions[path].strings for pattern in (_WORD, _OPTION))
        )
        for plugin, each in plugins:
            bound = frameworks & {*each.strings} if each.kind == "BindingSpec" else set[str]()
            if not (bound and here) or bound & here:
                for word in sorted(each.names & words):
                    reason = f"names {word!r}, which {plugin.name} registers"
                    yield Link(path, plugin.path, reason, is_alone=True)
                    for text in each.strings:
                        if re.fullmatch(r"\w+\.[\w.]+(:\w*)?", text):
                            yield from named_modules(sources, path, text, reason)


def _plugins(sources: Sources) -> Iterator[Module]:
    modules = sources.project.modules
    return (modules[name] for name in sorted(sources.project.entry_modules & modules.keys()))


def _registered(sources: Sources, plugin: Module) -> Iterator[Registered]:
    """Yield what a plugin registers; first itself, by the name of its package."""
    if plugin.package == CORE:
        return
    yield Registered("", frozenset([plugin.package.partition("_")[2]]), ())
    for each in registered(plugin.tree):
        if each.kind != "CommandSpec" or plugin.area != "launch":
            yield each
        if each.kind in ("ObserverSpec", "CommandOptionsSpec"):
            yield each._replace(names=frozenset(_options(sources, each.strings)))


def _options(sources: Sources, references: Iterable[str]) -> Iterator[str]:
    """Yield the options of commands, as "--status-port", that modules define."""
    for module in {text.partition(":")[0] for text in references} & sources.project.modules.keys():
        strings = sources.mentions[sources.project.modules[module].path].strings
        yield from (text for text in strings if _OPTION.fullmatch(text))


def _frameworks(sources: Sources, path: str, known: Iterable[Registered]) -> Iterator[str]:
    """Yield the frameworks that a file names. Keras is one where a framework has an adapter for it."""
    mentions = sources.mentions[path]
    text = "\n".join([*mentions.strings, *(item.module for item in mentions.imports)])
    for each in known:
        if each.kind == "FrameworkSpec":
            has_keras = any("keras" in string for string in each.strings) and "keras" in text
            yield from (name for name in each.names if has_keras or name in text)


def _closure(path: str, used: Mapping[str, Collection[str]]) -> set[str]:
    """Return a file, all that it uses, and what that uses."""
    found, waiting = {path}, [path]
    while waiting:
        new = {*used.get(waiting.pop(), ())} - found
        found |= new
        waiting += new
    return found
