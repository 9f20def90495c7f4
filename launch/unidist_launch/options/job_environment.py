"""From the options of `unidist launch` to the variables of its ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from unidist.errors import ConfigurationError
from unidist.settings.environment import MAX_CACHE_CAPACITY, Settings
from unidist_launch.options import horovodrun

_TEXTS = {
    "UNIDIST_STRATEGY": "strategy",
    "UNIDIST_ENGINE": "engine",
    "UNIDIST_ALLREDUCE_ALGORITHM": "allreduce_algorithm",
    "UNIDIST_LOG_LEVEL": "log_level",
    "UNIDIST_VERIFY": "verify",
    "UNIDIST_ON_NONFINITE": "on_nonfinite",
}
_NUMBERS = {
    "UNIDIST_TIMEOUT_SEC": "timeout",
    "UNIDIST_START_TIMEOUT_SEC": "start_timeout",
    "UNIDIST_STALL_SHUTDOWN_SEC": "stall_shutdown",
    "UNIDIST_CYCLE_TIME_MS": "cycle_time_ms",
}
_SWITCHES = {
    "UNIDIST_TIMELINE_MARK_CYCLES": "timeline_mark_cycles",
    "UNIDIST_TIMELINE_PER_TENSOR": "timeline_per_tensor",
    "UNIDIST_LOG_TIMESTAMP": "log_with_timestamp",
    "UNIDIST_AUTOTUNE": "autotune",
    "UNIDIST_AS_HOROVOD": "as_horovod",
    "UNIDIST_TLS": "tls",
}


def variables(ctx: click.Context, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables for every rank: the file's, then --env, then what options stand for.

    Options that Horovod has too also set its variables, for `--engine horovod`.

    Raises:
        ConfigurationError: options contradict each other, or one cannot be carried out.
    """
    if options["verbose"] and options["quiet"]:
        raise ConfigurationError("--verbose and --quiet exclude each other; give one of them.")
    # Python buffers what it writes to a pipe: a killed rank would take its last words with it.
    defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    env = {name: value for name, value in defaults.items() if name not in os.environ}
    for item in (*ctx.meta.get("unidist.config_env", ()), *options["env"]):
        name, equals, value = item.partition("=")
        if not name or (not equals and name not in os.environ):
            raise ConfigurationError(
                f"--env {item!r}: write KEY=VALUE, or the KEY of a variable that is set; it is not."
            )
        if equals:
            env[name] = value
    chosen = _chosen(ctx, options)
    env |= chosen | horovodrun.horovod_variables(chosen) | horovodrun.tuning_variables(options)
    env |= network_variables(options)
    if options["verbose"] and not {"UNIDIST_LOG_LEVEL", "HOROVOD_LOG_LEVEL"} & {**os.environ, **env}.keys():
        env["UNIDIST_LOG_LEVEL"] = "info"
    return env


def check_timeline(options: Mapping[str, Any], settings: Settings) -> None:
    """Refuse details of a trace that is not written."""
    if options["timeline_per_tensor"] and settings.timeline is None:
        raise ConfigurationError("--timeline-per-tensor is about a trace; add --timeline FILE.")


def _chosen(ctx: click.Context, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that stand for options which were given."""
    chosen = {name: options[option] for name, option in _TEXTS.items() if options[option] is not None}
    chosen |= {name: f"{options[option]:g}" for name, option in _NUMBERS.items() if options[option] is not None}
    chosen |= {name: str(int(options[option])) for name, option in _SWITCHES.items() if options[option] is not None}
    if options["cache_capacity"] is not None:
        chosen["UNIDIST_CACHE_CAPACITY"] = str(min(options["cache_capacity"], MAX_CACHE_CAPACITY))
    if options["fusion_threshold_mb"] is not None:
        chosen["UNIDIST_FUSION_THRESHOLD_BYTES"] = str(options["fusion_threshold_mb"] << 20)
    if (stall_check := _stall_check(ctx, options)) is not None:
        chosen["UNIDIST_STALL_CHECK_SEC"] = f"{stall_check:g}"
    if options["autotune_log_file"] is not None:
        chosen["UNIDIST_AUTOTUNE_LOG"] = str(options["autotune_log_file"].absolute())
    if options["timeline"] is not None:
        chosen["UNIDIST_TIMELINE"] = str(_timeline(options["timeline"]))
    if options["plugin"]:
        disabled = [*Settings.read().disabled_plugins, *map(_disabled_plugin, options["plugin"])]
        chosen["UNIDIST_DISABLE_PLUGINS"] = ",".join(dict.fromkeys(disabled))
    return chosen


def _stall_check(ctx: click.Context, options: Mapping[str, Any]) -> float | None:
    """Return the seconds of --stall-check and --no-stall-check; the command line wins over a file."""
    seconds: float | None = options["stall_check"]
    if not options["no_stall_check"]:
        return seconds
    if seconds:
        sources = {name: ctx.get_parameter_source(name) for name in ("stall_check", "no_stall_check")}
        if len(set(sources.values())) == 1:
            raise ConfigurationError(f"--stall-check {seconds:g} and --no-stall-check exclude each other; give one.")
        if sources["stall_check"] is ParameterSource.COMMANDLINE:
            return seconds
    return 0.0


def network_interfaces(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that --network-interfaces gives, each once."""
    names = (name.strip() for item in options["network_interfaces"] for name in item.split(","))
    return tuple(dict.fromkeys(names))


def network_variables(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables by which NCCL and Horovod take their network interfaces."""
    found = {}
    if options["tcp"]:
        found["NCCL_IB_DISABLE"] = "1"
    names = network_interfaces(options)
    if names:
        found["NCCL_SOCKET_IFNAME"] = ",".join(names)
        found["HOROVOD_GLOO_IFACE"] = names[0]
    return found


def warnings_of_options(options: Mapping[str, Any], settings: Settings, *, here: bool) -> list[str]:
    """Return a sentence for each option that was given and has no effect, or another.

    Args:
        options: of the command line.
        settings: of the ranks.
        here: all ranks run on this host.
    """
    found = horovodrun.warnings_of_flags(options, engine=settings.engine)
    if options["timeline_mark_cycles"] and settings.timeline is None:
        found.append("--timeline-mark-cycles marks the cycles of a trace; add --timeline FILE.")
    if here and settings.tls:
        found.append(
            "--tls: all ranks run on this host, and nothing that they send leaves it; --tls is about other hosts."
        )
    if here:
        ssh = [name for name in ("ssh_port", "ssh_identity_file", "ssh_command") if options[name] is not None]
        if ssh:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in ssh)
            found.append(f"{named}: not used, for all ranks run on this host; name the others by -H or --hostfile.")
        present = [name for _, name in socket.if_nameindex()]
        absent = [name for name in network_interfaces(options) if name not in present]  # other hosts may have them
        if absent:
            found.append(f"--network-interfaces: there is no {', '.join(absent)} here, only {', '.join(present)}.")
    capacity = options["cache_capacity"]
    if capacity is not None and capacity > MAX_CACHE_CAPACITY:
        found.append(f"--cache-capacity {capacity}: {MAX_CACHE_CAPACITY} are taken, the most that is possible.")
    return found


def _disabled_plugin(item: str) -> str:
    prefix, colon, name = item.partition(":")
    if prefix != "no" or not colon or not name or "," in name:
        hint = f" (-p is not horovodrun's --ssh-port: write --ssh-port {item}.)" if item.isdigit() else ""
        raise ConfigurationError(f"-p {item!r}: write no:NAME, with a name that `unidist plugins` lists.{hint}")
    return name


def _timeline(text: str) -> Path:
    """Return the trace file as a full path, for scripts may change their folder."""
    file = Path(text).absolute()
    if not file.parent.is_dir():
        raise ConfigurationError(f"--timeline {text!r}: folder {str(file.parent)!r} does not exist.")
    return file
