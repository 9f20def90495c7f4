"""`unidist plugin new`: writes a distribution with a plugin whose tests pass, for its author to change."""

from __future__ import annotations

import keyword
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import click

from unidist.errors import ConfigurationError

_HELP = {"help_option_names": ["-h", "--help"]}
_SUFFIX = ".in"
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True)
class _PluginKind:
    """A kind of plugin, as the files that are common to all kinds describe it.

    Args:
        summary: what the plugin is, in a sentence.
        usage: how it is used, for the README.
        dependencies: distributions that it needs beside unidist's.
    """

    summary: str
    usage: str
    dependencies: tuple[str, ...] = ()


KINDS = {
    "strategy": _PluginKind(
        "A strategy: data parallelism with rounded gradients.",
        "    unidist launch -np 2 --strategy @name@=16 train.py",
        ("numpy >= 1.26",),
    ),
    "engine": _PluginKind(
        "An engine: moves data through Unix sockets.",
        "    unidist launch -np 2 --engine @name@ train.py",
        ("numpy >= 1.26",),
    ),
    "compressor": _PluginKind(
        "A compressor of gradients: signs and one magnitude travel.",
        "    unidist launch -np 2 --strategy data:compression=@name@ train.py",
        ("numpy >= 1.26",),
    ),
    "framework": _PluginKind(
        "A framework adapter: models of numpy arrays.",
        "The adapter is found by the models that are passed to unidist.",
        ("numpy >= 1.26",),
    ),
    "launcher": _PluginKind(
        "A launcher: ranks on this host, under a wrapper command.",
        "    @PACKAGE@_WRAPPER='nice -n 5' unidist launch -np 2 --launcher @name@ train.py",
    ),
    "events": _PluginKind(
        "Writes a JSON line for each turning point of a job.",
        "    @PACKAGE@_FILE=events.jsonl unidist launch -np 2 train.py",
    ),
}


@click.group(context_settings=_HELP)
def plugin() -> None:
    """Begin a plugin."""


@plugin.command(context_settings=_HELP)
@click.argument("name")
@click.option("--kind", type=click.Choice([*KINDS]), required=True, help="What it registers.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where to write it; made if there is none (default: NAME).",
)
def new(name: str, kind: str, folder: Path | None) -> None:
    """Write a distribution with a plugin NAME: small, real, typed, and with tests that pass.

    \b
      unidist plugin new my-compressor --kind compressor
      pip install -e './my-compressor[test]'
      pytest my-compressor
    """
    folder = folder or Path(name)
    files = rendered(name, kind)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError(f"{str(folder)!r} is there and not empty; give --folder another name")
    for path, text in files.items():
        target = folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as exc:
            raise ConfigurationError(f"{str(target)!r} cannot be written: {exc.strerror or exc}") from exc
    click.echo(f"wrote {len(files)} files to {folder}. Next:")
    click.echo(f"  pip install -e {shlex.quote(f'{folder.resolve()}[test]')}")
    click.echo(f"  pytest {shlex.quote(str(folder))}")


def rendered(name: str, kind: str) -> dict[str, str]:
    """Return the text of each file of a new plugin, by its path.

    Args:
        name: of the distribution, and of what it registers: "my-compressor".
        kind: one of `KINDS`.

    Raises:
        ConfigurationError: the name cannot be one of a package too.
    """
    package = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(package):
        raise ConfigurationError(
            f"{name!r} cannot be the name of a plugin: write small letters and digits, with single dashes between words"
        )
    if package.partition("_")[0] == "unidist" and package in _taken():
        raise ConfigurationError(f"{name!r} would hide a package of unidist; give another name")
    about = KINDS[kind]
    words = {
        "usage": about.usage,
        "summary": about.summary,
        "dependencies": ", ".join(f'"{each}"' for each in ("unidist-train", *about.dependencies)),
        "module": kind,
        "Class": "".join(word.capitalize() for word in name.split("-")),
        "PACKAGE": package.upper(),
        "package": package,
        "name": name,
    }
    templates = resources.files("unidist_launch") / "plugin_templates"
    found = {}
    for folder in ("common", kind):
        for path, text in _templates(templates / folder):
            found[_substituted(path, words)] = _substituted(text, words)
    return found


def _templates(folder: Traversable, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each file that a folder of templates makes, and its text before substitution."""
    for item in sorted(folder.iterdir(), key=lambda each: each.name):
        if item.is_dir():
            yield from _templates(item, f"{above}{item.name}/")
        elif item.name.endswith(_SUFFIX):
            yield above + item.name.removesuffix(_SUFFIX), item.read_text(encoding="utf-8")


def _substituted(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text


def _taken() -> frozenset[str]:
    from importlib.metadata import packages_distributions

    return frozenset(packages_distributions()) | {"unidist", "unidist_launch"}
