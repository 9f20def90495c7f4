"""The options of `unidist launch`, under headings. Where horovodrun has a flag for the same, its name works too.

Horovod's name is an alias, which `--help` leaves out and docs/horovod.md lists, where our own says it better.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from unidist.settings.environment import LOG_LEVELS
from unidist_launch.display.grouped_help import GroupedOption
from unidist_launch.options import completion, config_file, elastic_options
from unidist_launch.options.config_file import ValueKind
from unidist_launch.options.numbers import Real, Seconds, Whole
from unidist_launch.options.strategy_options import SPREAD

_SECONDS = Seconds()
_SECONDS_OR_ZERO = Seconds(zero=True)
_NOT_IN_FILE = frozenset({"config", "module", "help", "check_build", "version"})

_JOB = "The job"
_HOSTS = "Hosts"
_LIMITS = "Time limits"
_OUTPUT = "What is shown and kept"
_TUNING = "Tuning of named operations"

Decorator = Callable[[Any], Any]


def _option(group: str, *names: str, **attributes: Any) -> Decorator:
    return click.option(*names, cls=GroupedOption, group=group, **attributes)


def _read_config(ctx: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Make the file's options the defaults of this call, so that the command line wins."""
    if value is not None:
        options = _file_options(ctx)
        warn = _warn if ctx.obj == config_file.UNKNOWN_IS_WARNED else None
        found = config_file.read(value, {name: kind for name, (_, kind) in options.items()}, warn=warn)
        ctx.meta["unidist.config_env"] = found.pop("env", ())
        ctx.default_map = config_file.by_parameter(
            value, found, {name: parameter for name, (parameter, _) in options.items()}
        )
    return value


def _warn(text: str) -> None:
    click.echo(f"unidist: warning: {text}", err=True)


def _file_options(ctx: click.Context) -> dict[str, tuple[str, ValueKind]]:
    """Return parameter name and kind by option name, for every option that may stand in a file."""
    options: dict[str, tuple[str, ValueKind]] = {}
    for parameter in ctx.command.get_params(ctx):
        if not isinstance(parameter, click.Option) or parameter.name in _NOT_IN_FILE:
            continue
        kind = ValueKind.FLAG if parameter.is_flag else ValueKind.LIST if parameter.multiple else ValueKind.TEXT
        for name in (opt.removeprefix("--") for opt in parameter.opts if opt.startswith("--")):
            options[name] = (parameter.name or name, ValueKind.ENVIRONMENT if name == "env" else kind)
    return options


OPTIONS: tuple[Decorator, ...] = (
    _option(
        _JOB,
        *("-np", "-n", "--num-proc"),
        type=Whole(min=1),
        metavar="N",
        help="Number of processes (default: all slots of the hosts or the allocation, else of GPUs, else of cores).",
    ),
    _option(
        _HOSTS,
        *("-H", "--hosts"),
        metavar="HOST:SLOTS,...",
        help="Where ranks run, and how many at most; filled in this order (default: this host).",
    ),
    _option(
        _HOSTS,
        "--hostfile",
        "hostfile",
        aliases=("-hostfile",),
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="The same from a file, a line for each: HOST slots=N.",
    ),
    _option(
        _HOSTS,
        "--ssh-port",
        type=Whole(min=1, max=65535),
        metavar="PORT",
        help="Port of the hosts' ssh servers (default: ssh's own choice).",
    ),
    _option(
        _HOSTS,
        "--ssh-identity-file",
        "ssh_identity_file",
        aliases=("-i",),
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Private key to log in with (default: ssh's own choice).",
    ),
    _option(_HOSTS, "--ssh-command", metavar="COMMAND", help="What to use for ssh, with arguments (default: ssh)."),
    _option(
        _JOB,
        "--as-horovod/--no-as-horovod",
        default=None,
        help="A script that imports horovod gets unidist, whether Horovod is installed or not.",
    ),
    _option(
        _JOB,
        "--env",
        multiple=True,
        metavar="KEY=VALUE",
        help="Variable for every rank. KEY alone: must be set already.",
    ),
    _option(_JOB, "--launcher", metavar="NAME", help="What starts the processes (default: by where this is, and -H)."),
    _option(_JOB, "-p", "--plugin", multiple=True, metavar="no:NAME", help="Do not load plugin NAME. Repeatable."),
    _option(
        _JOB,
        "--config",
        "config",
        aliases=("--config-file",),
        type=click.Path(path_type=Path),
        metavar="FILE",
        is_eager=True,
        callback=_read_config,
        help="Options from a YAML or TOML file, Horovod's sections too; the command line wins.",
    ),
    _option(_JOB, "-m", "--module", is_flag=True, help="COMMAND is a module, as in python -m."),
    *elastic_options.OPTIONS,
    _option(
        SPREAD,
        "--strategy",
        metavar="LINE",
        shell_complete=completion.strategies,
        help="How training is spread: NAME=VALUE:OPTION=VALUE,NAME=... (default: data).",
    ),
    _option(
        SPREAD,
        "--verify",
        metavar="WHEN",
        help="Compare the distributed model with the script's own: first, every=N or off (default: first); replay=N: "
        "compute a batch twice, bit for bit, every N steps.",
    ),
    _option(
        SPREAD,
        "--on-nonfinite",
        metavar="WHAT",
        help="What happens when a gradient is NaN or infinite: error, skip (the update) or off (default: off).",
    ),
    _option(
        SPREAD,
        "--engine",
        metavar="NAME",
        shell_complete=completion.engines,
        help="What moves the data (default: auto).",
    ),
    _option(
        SPREAD,
        "--allreduce-algorithm",
        metavar="NAME",
        help="naive, ring, tree or butterfly (default: the engine's own).",
    ),
    _option(
        SPREAD,
        "--network-interfaces",
        "network_interfaces",
        aliases=("--network-interface",),
        multiple=True,
        metavar="NAMES",
        help="Network interfaces to use, between hosts and by engines, with commas or repeated.",
    ),
    _option(SPREAD, "--tcp", is_flag=True, help="NCCL uses TCP, not InfiniBand."),
    _option(
        SPREAD,
        "--tls/--no-tls",
        default=None,
        help="Encrypt data between hosts, by the engine tcp; output of ranks and control messages are not.",
    ),
    _option(_LIMITS, "--timeout", type=_SECONDS, metavar="SECONDS", help="Longest wait for a peer (default: 1800)."),
    _option(
        _LIMITS,
        "--start-timeout",
        type=_SECONDS,
        metavar="SECONDS",
        help="Longest wait for all ranks to start (default: 120).",
    ),
    _option(
        _LIMITS,
        "--stall-check",
        "stall_check",
        aliases=("--stall-check-warning-time-seconds",),
        type=_SECONDS_OR_ZERO,
        metavar="SECONDS",
        help="Report operations that wait longer (default: 60; 0: never).",
    ),
    _option(_LIMITS, "--no-stall-check", is_flag=True, help="As --stall-check 0."),
    _option(
        _LIMITS,
        "--stall-shutdown",
        "stall_shutdown",
        aliases=("--stall-check-shutdown-time-seconds",),
        type=_SECONDS_OR_ZERO,
        metavar="SECONDS",
        help="End the job when an operation waits longer (default: 0: only --timeout does).",
    ),
    _option(
        _LIMITS,
        "--grace-period",
        type=_SECONDS_OR_ZERO,
        default=10.0,
        metavar="SECONDS",
        help="From SIGTERM to SIGKILL (default: 10).",
    ),
    _option(
        _OUTPUT,
        "--output-dir",
        "output_dir",
        aliases=("--output-filename",),
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Keep output in DIR/rank.R/stdout and stderr.",
    ),
    _option(
        _OUTPUT,
        "--timeline",
        "timeline",
        aliases=("--timeline-filename",),
        metavar="FILE",
        help="Write a Chrome trace; %r in the name becomes the rank.",
    ),
    _option(
        _OUTPUT,
        "--timeline-mark-cycles/--no-timeline-mark-cycles",
        default=None,
        help="The trace shows each round of negotiation.",
    ),
    _option(
        _OUTPUT,
        "--timeline-per-tensor/--no-timeline-per-tensor",
        default=None,
        help="The trace has a row for each tensor instead of one for each phase.",
    ),
    _option(
        _OUTPUT,
        "--prefix-output-with-timestamp",
        aliases=("-prefix-timestamp",),
        is_flag=True,
        help="Lines of the ranks begin with the time.",
    ),
    _option(
        _OUTPUT,
        "--full-tracebacks",
        is_flag=True,
        help="Show the tracebacks of all ranks, with the frames of unidist.",
    ),
    _option(
        _OUTPUT,
        "--drop-unread-output",
        is_flag=True,
        help="Drop lines while nobody reads the output, instead of waiting.",
    ),
    _option(
        _OUTPUT,
        "--log-level",
        type=click.Choice([*LOG_LEVELS], case_sensitive=False),
        metavar="LEVEL",
        help="trace, debug, info, warning, error or fatal (default: warning).",
    ),
    _option(
        _OUTPUT,
        "--log-with-timestamp/--log-without-timestamp",
        "log_with_timestamp",
        aliases=("--no-log-hide-timestamp/--log-hide-timestamp",),
        default=None,
        help="unidist's own log lines begin with the time.",
    ),
    _option(_OUTPUT, "-v", "--verbose", is_flag=True, help="Say what the launcher does; log level info on the ranks."),
    _option(_OUTPUT, "-q", "--quiet", is_flag=True, help="Show standard output of rank 0 only, and no status line."),
    _option(
        _TUNING,
        "--fusion-threshold-mb",
        type=Whole(min=0),
        metavar="MIB",
        help="Operations are fused up to this size (default: 64; 0: never).",
    ),
    _option(
        _TUNING,
        "--cycle-time-ms",
        type=Real(min=0),
        metavar="MS",
        help="Longest pause between two rounds while ranks disagree (default: 1).",
    ),
    _option(
        _TUNING,
        "--cache-capacity",
        type=Whole(min=0),
        metavar="N",
        help="Names that ranks need not spell out again (default: 8192; 0: none).",
    ),
    _option(
        _TUNING,
        "--autotune/--no-autotune",
        default=None,
        help="Find the best size of gradient buckets in the first updates.",
    ),
    _option(
        _TUNING,
        "--autotune-log-file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Keep what --autotune tried, as CSV.",
    ),
)


def add_options(function: Any) -> Any:
    """Decorate a click callback with all options."""
    for decorator in reversed(OPTIONS):
        function = decorator(function)
    return function
