"""Options of a command under headings, so that a long `--help` can be read."""

from __future__ import annotations

from typing import Any

import click


class GroupedOption(click.Option):
    """An option with the heading under which `--help` shows it, and names that work but are not shown.

    Args:
        parameter_declarations: names, as for `click.Option`.
        group: the heading.
        aliases: further names (`--x`, or `--x/--no-x` for a switch) that `--help` leaves out.
        attributes: everything else that `click.Option` takes.
    """

    def __init__(
        self, parameter_declarations: list[str], *, group: str, aliases: tuple[str, ...] = (), **attributes: Any
    ) -> None:
        super().__init__([*parameter_declarations, *aliases], **attributes)
        self.group = group
        self._aliases = {name for alias in aliases for name in alias.split("/")}

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return what `--help` shows: the names without the aliases, and the help text."""
        names = self.opts, self.secondary_opts
        self.opts, self.secondary_opts = ([name for name in some if name not in self._aliases] for some in names)
        try:
            return super().get_help_record(ctx)
        finally:
            self.opts, self.secondary_opts = names


class GroupedCommand(click.Command):
    """A command that lists its options by heading, in the order in which the headings first appear."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per heading; options without one come last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        others: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                records = sections.setdefault(parameter.group, []) if isinstance(parameter, GroupedOption) else others
                records.append(record)
        for heading, records in {**sections, "Other": others}.items():
            with formatter.section(heading):
                formatter.write_dl(records)
