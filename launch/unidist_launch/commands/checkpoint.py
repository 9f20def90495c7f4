"""`unidist checkpoint`: what is in a checkpoint, whether it is whole, and the same in other formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from unidist.checkpoint.format import directory
from unidist.checkpoint.format.index import Index
from unidist.errors import CheckpointError, ConfigurationError
from unidist.registry import load_object
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings

if TYPE_CHECKING:
    from unidist.checkpoint.convert import Export, Import

_HELP = {"help_option_names": ["-h", "--help"]}
_FOLDER = click.argument("path", type=click.Path(path_type=Path))


@click.group(context_settings=_HELP)
def checkpoint() -> None:
    """Show, verify and convert checkpoints that `save` wrote.

    PATH is a checkpoint, or a series of them, of which the latest complete one is taken.
    """


@checkpoint.command(context_settings=_HELP)
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--section", help="Show this section only (model, optimizer, ...).")
def show(path: Path, as_json: bool, section: str | None) -> None:
    """Show tensors, sizes and pieces. Reads the index alone."""
    folder = directory.find(path)
    index = Index.read(folder)
    rows = list(_rows(index, section))
    if section is not None and section not in index.sections:
        raise ConfigurationError(f"there is no section {section!r} in {folder}; choices: {', '.join(index.sections)}")
    if as_json:
        values = {name: stored.values for name, stored in index.sections.items() if section in (None, name)}
        click.echo(json.dumps({"path": str(folder), "facts": index.facts, "tensors": rows, "values": values}, indent=2))
    else:
        _print_table(folder, index, rows)


@checkpoint.command(context_settings=_HELP)
@_FOLDER
@click.option("--all", "every", is_flag=True, help="Of a series, verify every complete checkpoint.")
def verify(path: Path, every: bool) -> int:
    """Read everything and compare it with its checksums. Exit code 1 if something is damaged."""
    from rich.console import Console
    from rich.markup import escape

    series = [folder for _, folder in directory.steps(path)] if every else []
    console = Console()
    damaged = 0
    for folder in series or [directory.find(path)]:
        problems = list(_problems(folder, console))
        damaged += bool(problems)
        for problem in problems:
            console.print(f"[red]damaged[/red] {escape(problem)}", soft_wrap=True)
        if not problems:
            index = Index.read(folder)
            total = sum(nbytes for _, nbytes in index.shards)
            console.print(f"[green]whole[/green] {escape(str(folder))}: {_size(total)}", soft_wrap=True)
    return 1 if damaged else 0


@checkpoint.command(context_settings=_HELP)
@_FOLDER
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--section", default="model", show_default=True, help="The section to convert.")
@click.option(
    "--mapping", type=click.Path(path_type=Path), help="YAML or JSON: names and dims in OUTPUT for the checkpoint's."
)
@click.option("--model", default="", metavar="MODULE:FUNCTION", help="Returns the model, for Keras' own formats.")
@click.option("--force", is_flag=True, help="Replace OUTPUT if it is there.")
def convert(path: Path, output: Path, section: str, mapping: Path | None, model: str, force: bool) -> None:
    """Write a checkpoint in the format that the suffix of OUTPUT says.

    .safetensors: one file. .pt: a state_dict of PyTorch. .dcp: a folder of torch.distributed.checkpoint.
    .weights.h5, .keras: for Keras. PATH may also be a folder of torch.distributed.checkpoint; OUTPUT is then a
    checkpoint.
    """
    from unidist.checkpoint.format.mapping import NameMapping

    if output.exists() and not force:
        raise ConfigurationError(f"{output} is there already; give another name, or --force to replace it")
    if not output.parent.is_dir():
        raise ConfigurationError(f"{output} cannot be written: there is no folder {output.parent}; make it first")
    importer = _importer(path)
    if importer is not None:
        from unidist.checkpoint.convert import to_checkpoint

        to_checkpoint(output, importer(path), {"framework": "imported"})
    else:
        export = _export(output.name)
        names = NameMapping.of(mapping) if mapping is not None else NameMapping({})
        try:
            export(directory.find(path), output, section=section, mapping=names, model=model)
        except OSError as exc:
            raise CheckpointError(f"{output} cannot be written: {exc.strerror or exc}") from exc
    click.echo(f"wrote {output}")


def _rows(index: Index, section: str | None) -> Iterator[dict[str, Any]]:
    for name, stored in index.sections.items():
        if section is not None and name != section:
            continue
        for tensor in stored.tensors.values():
            info = tensor.info
            yield {
                "section": name,
                "name": info.name,
                "shape": list(info.shape),
                "dtype": str(info.dtype),
                "bytes": info.nbytes,
                "pieces": len(tensor.pieces),
            }


def _print_table(folder: Path, index: Index, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    known = {key: value for key, value in index.facts.items() if value is not None}
    console.print(escape(str(folder)), style="bold", soft_wrap=True)
    console.print(escape(", ".join(f"{key}: {value}" for key, value in known.items())), soft_wrap=True)
    table = Table("section", "tensor", "type", "shape")
    table.add_column("size", justify="right")
    table.add_column("pieces", justify="right")
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        table.add_row(row["section"], escape(row["name"]), row["dtype"], shape, _size(row["bytes"]), str(row["pieces"]))
    console.print(table)
    files = sum(nbytes for _, nbytes in index.shards)
    data = sum(row["bytes"] for row in rows)
    console.print(f"{len(rows)} tensors, {_size(data)}; {len(index.shards)} shards, {_size(files)}")


def _problems(folder: Path, console: Any) -> Iterator[str]:
    """Yield the damage of a checkpoint, one line per piece."""
    from rich.progress import Progress

    from unidist.checkpoint.format.reader import Checkpoint

    try:
        opened = Checkpoint(folder)
    except CheckpointError as exc:
        yield str(exc)
        return
    with opened, Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        pieces = list(opened.index.pieces())
        task = progress.add_task("reading", total=sum(tensor.info.nbytes for _, tensor, _ in pieces) or 1)
        seen = set()
        for _, tensor, piece in pieces:
            try:
                opened.check(tensor, piece)
            except CheckpointError as exc:
                if str(exc) not in seen:  # a shard that is missing is missing for all of its pieces
                    seen.add(str(exc))
                    yield str(exc)
            progress.advance(task, piece.part.count * tensor.info.dtype.itemsize)


def _export(name: str) -> Export:
    """Return what writes files of this name.

    Raises:
        ConfigurationError: nothing does; lists the suffixes.
    """
    choices = {".safetensors": "unidist.checkpoint.convert:to_safetensors"}
    for spec in _plugins().frameworks:
        choices.update(spec.exports)
    for suffix, path in choices.items():
        if name.endswith(suffix):
            return cast("Export", _loaded(path, suffix))
    raise ConfigurationError(f"{name!r} has no suffix of a known format; choices: {', '.join(sorted(choices))}")


def _importer(folder: Path) -> Import | None:
    """Return what reads a folder of another format; None if it is a checkpoint of ours, or nothing that is known."""
    if not directory.is_complete(folder):
        for spec in _plugins().frameworks:
            for marker, path in spec.imports:
                if (folder / marker).is_file():
                    return cast("Import", _loaded(path, marker))
    return None


def _loaded(path: str, what: str) -> object:
    return load_object(path, f"converter {what!r}")


def _plugins() -> PluginManager:
    return PluginManager(Settings.read().disabled_plugins).load()


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
