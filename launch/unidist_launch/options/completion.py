"""Completion of option values by the shell: the names that plugins have registered."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

from unidist.runtime.plugin_manager import PluginManager
from unidist_launch.options.plugin_options import load_plugins


def engines(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the engines whose names begin so."""
    found = [("auto", "chosen by what is there"), *((spec.name, spec.summary) for spec in _plugins().engines)]
    return _items(found, incomplete)


def strategies(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the strategies whose names begin as the last one of an incomplete line: "zero=2,acc"."""
    before, comma, last = incomplete.rpartition(",")
    return _items(((spec.name, spec.summary) for spec in _plugins().strategies), last, before=before + comma)


def _plugins() -> PluginManager:
    logging.getLogger("unidist.plugins").setLevel(logging.CRITICAL)  # the shell shows what is written
    return load_plugins()


def _items(found: Iterable[tuple[str, str]], incomplete: str, *, before: str = "") -> list[CompletionItem]:
    return [CompletionItem(before + name, help=text) for name, text in found if name.startswith(incomplete)]


__all__ = ["engines", "strategies"]
