"""`unidist launch`: from options, file and environment to a checked job, then to its launcher."""

from __future__ import annotations

import difflib
import os
import resource
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from unidist import preflight
from unidist.environment import VARIABLES, Settings
from unidist.errors import ConfigurationError
from unidist.launcher import Job
from unidist.plugins import PluginManager
from unidist_launch import command_line, config_file
from unidist_launch.config_file import Kind

_SECONDS = click.FloatRange(min=0, min_open=True)
_NOT_IN_FILE = frozenset({"config", "module", "help"})


def _read_config(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Make the file's options the defaults of this call, so that the command line wins."""
    if value is not None:
        options = _file_options(ctx.command)
        found = config_file.read(value, {name: kind for name, (_, kind) in options.items()})
        ctx.meta["unidist.config_env"] = found.pop("env", ())
        ctx.default_map = {options[name][0]: item for name, item in found.items()}
    return value


def _file_options(command: click.Command) -> dict[str, tuple[str, Kind]]:
    """Return parameter name and kind by option name, for every option that may stand in a file."""
    options = {}
    for parameter in command.params:
        long = [name for name in parameter.opts if name.startswith("--")]
        if not isinstance(parameter, click.Option) or not long or parameter.name in _NOT_IN_FILE:
            continue
        kind = Kind.FLAG if parameter.is_flag else Kind.LIST if parameter.multiple else Kind.TEXT
        name = long[0].removeprefix("--")
        options[name] = (parameter.name or name, Kind.ENVIRONMENT if name == "env" else kind)
    return options


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@click.option(
    "-np", "-n", "--num-proc", type=click.IntRange(min=1), required=True, metavar="N", help="Number of processes."
)
@click.option(
    "--strategy", metavar="LINE", help="How training is spread: NAME=VALUE:OPTION=VALUE,NAME=... (default: data)."
)
@click.option("--engine", metavar="NAME", help="What moves the data (default: auto).")
@click.option(
    "--allreduce-algorithm", metavar="NAME", help="naive, ring, tree or butterfly (default: the engine's own)."
)
@click.option(
    "--env", multiple=True, metavar="KEY=VALUE", help="Variable for every rank. KEY alone: must be set already."
)
@click.option(
    "--output-dir", type=click.Path(path_type=Path), metavar="DIR", help="Keep output in DIR/rank.R/stdout and stderr."
)
@click.option("--timeline", metavar="FILE", help="Write a Chrome trace; %r in the name becomes the rank.")
@click.option(
    "--timeout", type=_SECONDS, metavar="SECONDS", help="Longest wait for a peer in one operation (default: 1800)."
)
@click.option(
    "--start-timeout", type=_SECONDS, metavar="SECONDS", help="Longest wait for all ranks to start (default: 120)."
)
@click.option(
    "--stall-check",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Report operations that wait longer (default: 60; 0: never).",
)
@click.option(
    "--grace-period",
    type=click.FloatRange(min=0),
    default=10.0,
    metavar="SECONDS",
    help="From SIGTERM to SIGKILL (default: 10).",
)
@click.option("--launcher", default="local", metavar="NAME", help="What starts the processes (default: local).")
@click.option("-p", "--plugin", multiple=True, metavar="no:NAME", help="Do not load plugin NAME. Repeatable.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    is_eager=True,
    callback=_read_config,
    help="Options from a YAML or TOML file; the command line wins.",
)
@click.option("-v", "--verbose", is_flag=True, help="Say what the launcher does; log level info on the ranks.")
@click.option("-q", "--quiet", is_flag=True, help="Show standard output of rank 0 only, and no status line.")
@click.option("-m", "--module", is_flag=True, help="COMMAND is a module, as in python -m.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(ctx: click.Context, /, command: tuple[str, ...], **options: Any) -> int:
    """Run COMMAND on N processes of this machine.

    COMMAND is a Python script (a path ending in .py), a module after -m, or any program, with its
    arguments. Options of `unidist launch` stand before it.

    \b
      unidist launch -np 4 train.py --lr 0.1
      unidist launch -np 4 -m package.train
      unidist launch -np 4 bash -c 'echo $RANK'

    The exit code is that of the process that failed first (128 + n for signal n), or 2 when the command
    itself is wrong. Ctrl-C ends all ranks; a second one kills them at once.
    """
    env = _job_environment(options, ctx.meta.get("unidist.config_env", ()))
    merged = {**os.environ, **env}
    settings = Settings.read(merged)
    _warn_of_misspelt(merged)
    full_command = command_line.resolve(command, module=options["module"], environ=merged)
    num_proc: int = options["num_proc"]
    output_dir: Path | None = options["output_dir"]
    _check_descriptors(num_proc, output_dir)
    manager = PluginManager(settings.disabled_plugins).load()
    preflight.check(settings, num_proc, manager)
    launcher = manager.launchers.get(options["launcher"]).load()
    usable = launcher.availability()
    if not usable.usable:
        raise ConfigurationError(f"launcher {options['launcher']!r} cannot be used on this machine: {usable.reason}")
    if options["verbose"]:
        click.echo(f"unidist: {num_proc} x {' '.join(full_command)}", err=True)
        for name in sorted(env):
            click.echo(f"unidist: {name}={env[name]}", err=True)
    job = Job(
        command=full_command,
        num_proc=num_proc,
        env=env,
        output_dir=output_dir,
        grace_period=timedelta(seconds=options["grace_period"]),
        verbose=options["verbose"],
        quiet=options["quiet"],
    )
    return launcher.run(job)


def _job_environment(options: Mapping[str, Any], from_file: tuple[str, ...]) -> dict[str, str]:
    """Return the variables for every rank: the file's, then --env, then what options stand for."""
    if options["verbose"] and options["quiet"]:
        raise ConfigurationError("--verbose and --quiet exclude each other; give one of them.")
    # Python buffers what it writes to a pipe: a killed rank would take its last words with it.
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    env = {name: value for name, value in defaults.items() if name not in os.environ}
    for item in (*from_file, *options["env"]):
        name, equals, value = item.partition("=")
        if not name or (not equals and name not in os.environ):
            raise ConfigurationError(
                f"--env {item!r}: write KEY=VALUE, or the KEY of a variable that is set; it is not."
            )
        if equals:
            env[name] = value
    texts = {
        "UNIDIST_STRATEGY": "strategy",
        "UNIDIST_ENGINE": "engine",
        "UNIDIST_ALLREDUCE_ALGORITHM": "allreduce_algorithm",
    }
    env |= {name: options[option] for name, option in texts.items() if options[option] is not None}
    seconds = {
        "UNIDIST_TIMEOUT_SEC": "timeout",
        "UNIDIST_START_TIMEOUT_SEC": "start_timeout",
        "UNIDIST_STALL_CHECK_SEC": "stall_check",
    }
    env |= {name: f"{options[option]:g}" for name, option in seconds.items() if options[option] is not None}
    if options["timeline"] is not None:
        env["UNIDIST_TIMELINE"] = str(_timeline(options["timeline"]))
    if options["plugin"]:
        disabled = [*Settings.read().disabled_plugins, *map(_disabled_plugin, options["plugin"])]
        env["UNIDIST_DISABLE_PLUGINS"] = ",".join(dict.fromkeys(disabled))
    if options["verbose"] and "UNIDIST_LOG_LEVEL" not in {**os.environ, **env}:
        env["UNIDIST_LOG_LEVEL"] = "info"
    return env


def _disabled_plugin(item: str) -> str:
    prefix, colon, name = item.partition(":")
    if prefix != "no" or not colon or not name or "," in name:
        raise ConfigurationError(f"-p {item!r}: write no:NAME, with a name that `unidist plugins` lists.")
    return name


def _timeline(text: str) -> Path:
    """Return the trace file as a full path, for scripts may change their folder."""
    file = Path(text).absolute()
    if not file.parent.is_dir():
        raise ConfigurationError(f"--timeline {text!r}: folder {str(file.parent)!r} does not exist.")
    return file


def _warn_of_misspelt(environ: Mapping[str, str]) -> None:
    for name in sorted(environ):
        if name.startswith("UNIDIST_") and name not in VARIABLES:
            # Plugins have variables of their own; only what looks like one of ours is worth a word.
            for near in difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.85):
                click.echo(f"unidist: warning: variable {name} is not one of unidist's; did you mean {near}?", err=True)


def _check_descriptors(num_proc: int, output_dir: Path | None) -> None:
    """Refuse a number of ranks whose pipes and files this process could not hold open."""
    needed = 64 + num_proc * (3 if output_dir is None else 5)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and needed > allowed:
        raise ConfigurationError(
            f"-np {num_proc} needs {needed} open files in the launcher, but {allowed} are allowed here. "
            f"Start fewer processes, or raise the limit: `ulimit -n {needed}`."
        )
