"""The options of elastic jobs, by Horovod's names, and what they come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from unidist.errors import ConfigurationError
from unidist.launcher import AUTO, DurableOptions, ElasticLimits, Host, interval_of
from unidist.mesh import Mesh
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings.environment import Settings
from unidist_launch.display.grouped_help import GroupedOption
from unidist_launch.options.fallback import read_fallback
from unidist_launch.options.numbers import Seconds, Whole

ELASTIC_GROUP = "Elastic: ranks come and go"
"""Heading of the options of elastic jobs."""

_SECONDS = Seconds()

Decorator = Callable[[Any], Any]


def _option(*names: str, **attributes: Any) -> Decorator:
    return click.option(*names, cls=GroupedOption, group=ELASTIC_GROUP, **attributes)


OPTIONS: tuple[Decorator, ...] = (
    _option(
        "--min-np",
        "min_np",
        aliases=("--min-num-proc",),
        type=Whole(min=1),
        metavar="N",
        help="The fewest ranks that train; makes the job elastic (default then: 1).",
    ),
    _option(
        "--max-np",
        "max_np",
        aliases=("--max-num-proc",),
        type=Whole(min=1),
        metavar="N",
        help="The most ranks; makes the job elastic (default then: -np).",
    ),
    _option(
        "--host-discovery-script",
        metavar="COMMAND",
        help="Prints the hosts, a line HOST:SLOTS for each; asked every second.",
    ),
    _option(
        "--slots-per-host",
        type=Whole(min=1),
        metavar="N",
        help="Slots of hosts that the script names without; or of this host, if it is the only one (default: -np).",
    ),
    _option(
        "--spares",
        type=Whole(min=0),
        metavar="N",
        help="On each host, N more processes stand by: one takes the place of a rank at once when it is lost.",
    ),
    _option(
        "--elastic-timeout",
        type=_SECONDS,
        metavar="SECONDS",
        help="Longest wait for --min-np ranks (default: 600).",
    ),
    _option(
        "--reset-limit",
        type=Whole(min=0),
        metavar="N",
        help="End the job when the ranks have changed more often (default: no limit).",
    ),
    _option(
        "--blacklist-cooldown-range",
        nargs=2,
        type=_SECONDS,
        metavar="MIN MAX",
        help="Pause of a slot whose rank has failed, doubled each time (default: none at first, then 1 to 60).",
    ),
    _option(
        "--step-timeout",
        type=_SECONDS,
        metavar="SECONDS",
        help="A rank hangs if it takes no step for longer, while others have or wait for it (default: never).",
    ),
    _option(
        "--event-log",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Add what happens to the ranks to FILE, a JSON object per line.",
    ),
    _option(
        "--state-dir",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Keep in DIR what the same command, started again, needs to go on with the job if this launcher dies.",
    ),
    _option(
        "--orphan-timeout",
        type=_SECONDS,
        metavar="SECONDS",
        help="With --state-dir: how long ranks without a launcher go on and look for it (default: 60).",
    ),
    _option(
        "--checkpoint-dir",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Save elastic states in DIR, which all hosts share; a job that finds a checkpoint there begins from it.",
    ),
    _option(
        "--checkpoint-interval",
        metavar="SECONDS|auto",
        help="Time between two checkpoints (default: auto, so that they take less than 3.5 % of the time).",
    ),
    _option(
        "--fallback-strategy",
        metavar="LINE",
        help="With too few ranks for the model, begin again from the latest checkpoint with this strategy instead.",
    ),
    _option(
        "--keep-last",
        type=Whole(min=1),
        metavar="N",
        help="With --checkpoint-dir: how many checkpoints stay (default: 2).",
    ),
)


def only_for_elastic_jobs(name: str) -> ConfigurationError:
    """Return the error for an option, by the name of its parameter, that was given to a job that is not elastic."""
    return ConfigurationError(
        f"--{name.replace('_', '-')} is for elastic jobs; give --min-np, --max-np or --host-discovery-script too."
    )


def is_elastic(options: Mapping[str, Any]) -> bool:
    """Return whether the options ask for an elastic job.

    Raises:
        ConfigurationError: there are options that only an elastic job has a use for, and it is none.
    """
    if any(options[name] is not None for name in ("min_np", "max_np", "host_discovery_script")):
        return True
    others = (
        "slots_per_host",
        "spares",
        "elastic_timeout",
        "reset_limit",
        "blacklist_cooldown_range",
        "step_timeout",
        "event_log",
        "state_dir",
        "orphan_timeout",
        "checkpoint_dir",
        "checkpoint_interval",
        "keep_last",
        "fallback_strategy",
    )
    given = next((name for name in others if options[name] not in (None, ())), None)
    if given is not None:
        raise only_for_elastic_jobs(given)
    return False


def limits(options: Mapping[str, Any], num_proc: int, hosts: tuple[Host, ...], settings: Settings) -> ElasticLimits:
    """Return what the options ask for.

    Args:
        options: of the command line.
        num_proc: ranks at the beginning.
        hosts: that were named; none: this one, or those of the script.
        settings: from the environment.

    Raises:
        ConfigurationError: they contradict each other.
    """
    script = options["host_discovery_script"]
    if script is not None and hosts:
        raise ConfigurationError("--host-discovery-script says which hosts there are; leave -H and --hostfile out.")
    slots = options["slots_per_host"]
    if slots is not None and hosts:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigurationError(f"the hosts are {listed}, with their slots; leave --slots-per-host out.")
    if slots is not None and script is None and slots < num_proc:
        raise ConfigurationError(f"-np {num_proc} needs {num_proc} slots, but --slots-per-host gives {slots}.")
    min_num = options["min_np"] or 1
    max_num = options["max_np"] or num_proc
    if not min_num <= num_proc <= max_num:
        raise ConfigurationError(
            f"--min-np {min_num}, -np {num_proc}, --max-np {max_num}: -np lies between the other two."
        )
    cooldown = options["blacklist_cooldown_range"] or None
    if cooldown is not None and cooldown[0] > cooldown[1]:
        raise ConfigurationError(f"--blacklist-cooldown-range {cooldown[0]:g} {cooldown[1]:g}: MIN is above MAX.")
    timeout, stall = options["elastic_timeout"], options["step_timeout"]
    return ElasticLimits(
        min_num=min_num,
        max_num=max_num,
        discovery_script=script,
        slots_per_host=slots,
        num_spares=options["spares"] or 0,
        reset_limit=options["reset_limit"],
        timeout=settings.elastic_timeout if timeout is None else timedelta(seconds=timeout),
        cooldown=cooldown,
        stall=None if stall is None else timedelta(seconds=stall),
        event_log=options["event_log"],
        state_dir=options["state_dir"],
        orphan_timeout=_orphan_timeout(options),
        durable=_durable(options),
    )


def in_replicas(limits: ElasticLimits, mesh: Mesh) -> ElasticLimits:
    """Return the limits of a job with this mesh, whose ranks train in whole replicas of the model.

    Raises:
        ConfigurationError: so many ranks, or so few, are no whole replicas.
    """
    found = replace(limits, mesh=mesh)
    if found.min_ranks > limits.max_num:
        raise ConfigurationError(
            f"--min-np {limits.min_num} and --max-np {limits.max_num}: ranks train in whole replicas of the model, of "
            f"{found.replica_size} each ({mesh}), and there is no number of these in between."
        )
    return found


def with_fallback(limits: ElasticLimits, options: Mapping[str, Any], manager: PluginManager) -> ElasticLimits:
    """Return the limits with the fallback that the options ask for, if any. After `in_replicas`.

    Raises:
        ConfigurationError: it cannot be used.
    """
    line = options["fallback_strategy"]
    if line is None:
        return limits
    if limits.replica_size == 1:
        raise ConfigurationError(
            f"--fallback-strategy {line} is for jobs whose strategy divides the model over ranks, and this job's does "
            "not: it goes on with any number of ranks."
        )
    if limits.durable is None:
        raise ConfigurationError("--fallback-strategy begins again from a checkpoint; give --checkpoint-dir too.")
    if limits.state_dir is not None:
        raise ConfigurationError(
            "--fallback-strategy and --state-dir: a launcher that takes over would not know which strategy the job has "
            "by then; leave one of them out."
        )
    return replace(limits, fallback=read_fallback(line, limits.max_num, manager))


def never_reached(limits: ElasticLimits, num_proc: int, hosts: tuple[Host, ...]) -> str:
    """Return a warning if there will never be slots for as many ranks as the limits allow, else ""."""
    slots = sum(host.slots for host in hosts) or limits.slots_per_host or num_proc
    if limits.discovery_script is not None or limits.max_num <= slots:
        return ""
    more = "name more hosts" if hosts else f"give --slots-per-host {limits.max_num}, -H or --host-discovery-script"
    return f"--max-np is {limits.max_num}, but there are {slots} slots, so there will be no more ranks; {more}."


def _durable(options: Mapping[str, Any]) -> DurableOptions | None:
    folder, interval, keep = (options[name] for name in ("checkpoint_dir", "checkpoint_interval", "keep_last"))
    if folder is None:
        given = next((name for name in ("checkpoint_interval", "keep_last") if options[name] is not None), None)
        if given is not None:
            raise ConfigurationError(f"--{given.replace('_', '-')} is for checkpoints; give --checkpoint-dir too.")
        return None
    return DurableOptions(folder.absolute(), interval_of(interval or AUTO), keep or DurableOptions.keep)


def _orphan_timeout(options: Mapping[str, Any]) -> timedelta:
    seconds = options["orphan_timeout"]
    if seconds is None:
        return ElasticLimits.orphan_timeout
    if options["state_dir"] is None:
        raise ConfigurationError("--orphan-timeout is for jobs that outlive their launcher; give --state-dir too.")
    return timedelta(seconds=seconds)
