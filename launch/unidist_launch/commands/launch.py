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

from unidist._version import __version__
from unidist.errors import ConfigurationError
from unidist.jobs import preflight, tf_config
from unidist.launcher import (
    Host,
    Job,
    JobObserver,
    KnowsHosts,
    Launcher,
    RemoteShell,
    RunsElasticJobs,
    StartsSideProcesses,
)
from unidist.runtime.plugin_manager import PluginManager
from unidist.settings import visible_devices
from unidist.settings.environment import VARIABLES, Settings
from unidist.strategy import OutlivesRanks, StrategySpec
from unidist_launch.display import machine
from unidist_launch.options import (
    command_line,
    elastic_options,
    horovodrun,
    job_environment,
    observer_options,
    torchrun,
)
from unidist_launch.options import hosts as host_list
from unidist_launch.options.launch_options import add_options
from unidist_launch.options.observer_options import ObservedCommand
from unidist_launch.options.strategy_options import with_strategy_options

_HERE, _ELSEWHERE, _ELASTIC = "local", "ssh", "elastic"
"""The launchers that are taken unless one is asked for: for this host alone, for others, and for elastic jobs."""


def _check_build(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from unidist_launch.commands.doctor import doctor

        ctx.exit(ctx.invoke(doctor, as_json=False, deep=False))


@click.command(
    cls=ObservedCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@add_options
@click.option(
    *("-cb", "--check-build"),
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_check_build,
    help="Show what is usable here, as `unidist doctor`.",
)
@click.version_option(__version__, "--version", prog_name="unidist")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(ctx: click.Context, /, command: tuple[str, ...], **options: Any) -> int:
    """Run COMMAND on N processes of this machine, or of several.

    COMMAND is a Python script (a path ending in .py), a module after -m, or any program, with its
    arguments. Options of `unidist launch` stand before it.

    \b
      unidist launch -np 4 train.py --lr 0.1
      unidist launch -np 4 -m package.train
      unidist launch -np 4 bash -c 'echo $RANK'
      unidist launch -np 8 -H node1:4,node2:4 train.py

    The exit code is that of the process that failed first (128 + n for signal n), or 2 when the command
    itself is wrong. Ctrl-C ends all ranks; a second one kills them at once. The flags of horovodrun work
    too.
    """
    return run_job(ctx, command, options)


def run_job(
    ctx: click.Context,
    command: tuple[str, ...],
    options: Mapping[str, Any],
    *,
    more_observers: tuple[JobObserver, ...] = (),
    shows_stdout: bool = True,
) -> int:
    """Run a job as `unidist launch` does; for other commands that start ranks, made by `launch_command`.

    Args:
        ctx: of the command.
        command: as on the command line of `unidist launch`.
        options: values of all options of `unidist launch`.
        more_observers: beside those that options ask for.
        shows_stdout: standard output of the ranks is shown; otherwise observers alone get it.

    Returns:
        The exit code, see `Launcher.run`.

    Raises:
        ConfigurationError: the options contradict each other, or what they ask for cannot be used; nothing is started.
    """
    env = job_environment.variables(ctx, options)
    merged = {**os.environ, **env}
    settings = Settings.read(merged)
    job_environment.check_timeline(options, settings)
    manager = observer_options.loaded(ctx, settings.disabled_plugins)
    line = with_strategy_options(settings.strategy, options, manager.registry(StrategySpec))
    if line != settings.strategy:
        env["UNIDIST_STRATEGY"] = line
        merged = {**os.environ, **env}
        settings = Settings.read(merged)
    given = _given_hosts(options)
    here = all(map(host_list.is_local, given))
    launcher_name = _launcher_name(options, manager, given)
    launcher = manager.launchers.get(launcher_name).load()
    if not given and isinstance(launcher, KnowsHosts):
        given = launcher.hosts()
    command_line.check_order(command, options["num_proc"])
    num_proc = _num_proc(ctx, options, given, merged)
    hosts = host_list.used(given, num_proc) if given else ()
    is_elastic = elastic_options.is_elastic(options)
    observers = observer_options.observers(ctx, manager, options, is_elastic=is_elastic)
    elastic = elastic_options.limits(options, num_proc, given, settings) if is_elastic else None
    if elastic is not None and (warning := elastic_options.never_reached(elastic, num_proc, given)):
        click.echo(f"unidist: warning: {warning}", err=True)
    if is_elastic and not isinstance(launcher, RunsElasticJobs):
        raise ConfigurationError(
            f"launcher {launcher_name!r} keeps the ranks that it started; leave --launcher out, or the options of "
            "elastic jobs (--min-np, --max-np, --host-discovery-script)."
        )
    is_here = here and (elastic is None or elastic.discovery_script is None)
    for warning in job_environment.warnings_of_options(options, settings, here=is_here):
        click.echo(f"unidist: warning: {warning}", err=True)
    # The options are told, or have other effects, too.
    ours = {**job_environment.network_variables(options), **horovodrun.tuning_variables(options)}
    _warn_of_variables({name: value for name, value in merged.items() if name not in ours}, settings)
    full_command = command_line.resolve(command, module=options["module"], environ=merged)
    output_dir: Path | None = options["output_dir"]
    _check_descriptors(num_proc, output_dir)
    place = host_list.places(hosts)[0][0] if hosts else None
    starts_here = (
        launcher_name in (_HERE, _ELASTIC)
        and all(map(host_list.is_local, hosts))
        and (elastic is None or elastic.discovery_script is None)
    )
    plan = preflight.check(
        settings, num_proc, manager, topology=place, elastic=is_elastic, here=starts_here, environ=merged
    )
    if elastic is not None and plan is not None:
        elastic = elastic_options.in_replicas(elastic, plan.mesh)
    if elastic is not None:
        elastic = elastic_options.with_fallback(elastic, options, manager)
    usable = launcher.availability()
    if not usable.usable:
        raise ConfigurationError(f"launcher {launcher_name!r} cannot be used on this machine: {usable.reason}")
    if options["verbose"]:
        click.echo(f"unidist: {num_proc} x {' '.join(full_command)}", err=True)
        for name in sorted(env):
            click.echo(f"unidist: {name}={env[name]}", err=True)
    job = Job(
        command=full_command,
        num_proc=num_proc,
        elastic=elastic,
        env=env,
        output_dir=output_dir,
        grace_period=timedelta(seconds=options["grace_period"]),
        verbose=options["verbose"],
        quiet=options["quiet"],
        timestamps=options["prefix_output_with_timestamp"],
        full_tracebacks=options["full_tracebacks"],
        drops_unread_output=options["drop_unread_output"],
        hosts=hosts if elastic is None else given,
        remote_shell=_remote_shell(options),
        network_interfaces=job_environment.network_interfaces(options),
        start_timeout=settings.start_timeout,
        heartbeat=settings.heartbeat,
        observers=(*observers, *more_observers),
        shows_stdout=shows_stdout,
        side_processes=preflight.side_processes(plan),
        outlives_ranks=plan is not None
        and not is_elastic
        and any(item.tolerates_lost_ranks(plan) for item in plan.all(OutlivesRanks)),
    )
    _check_side_processes(job, launcher_name, launcher)
    return launcher.run(job)


def _check_side_processes(job: Job, name: str, launcher: Launcher) -> None:
    """Refuse processes beside the ranks where they cannot be started, or would be forgotten."""
    if job.has_side_processes and not isinstance(launcher, StartsSideProcesses):
        wanted = ", ".join(each.name for each in job.side_processes) or "what an observer starts"
        raise ConfigurationError(
            f"launcher {name!r} starts ranks alone, and this job has processes beside them ({wanted}); use another "
            "launcher, or leave out the strategy or the option that needs them."
        )
    if job.side_processes and job.elastic is not None and job.elastic.state_dir is not None:
        raise ConfigurationError(
            f"--state-dir: a launcher that takes over does not find {job.side_processes[0].name} again, which ends "
            "with its launcher; leave it out, or the strategy that needs the process."
        )


def _given_hosts(options: Mapping[str, Any]) -> tuple[Host, ...]:
    """Return the hosts that the user names; none: this host, or what the launcher knows."""
    if options["hosts"] is not None and options["hostfile"] is not None:
        raise ConfigurationError("-H and --hostfile exclude each other; give one of them.")
    if options["hosts"] is not None:
        return host_list.parse(options["hosts"])
    if options["hostfile"] is not None:
        return host_list.read_hostfile(options["hostfile"])
    return ()


def _launcher_name(options: Mapping[str, Any], manager: PluginManager, given: tuple[Host, ...]) -> str:
    """Return the launcher that was asked for; else the one that belongs to where this is, or to the given hosts."""
    if options["launcher"]:
        return str(options["launcher"])
    is_elastic = elastic_options.is_elastic(options)
    is_ours = tf_config.is_ours(os.environ)
    if not given and options["host_discovery_script"] is None:
        # In a process of a job of ours, TF_CONFIG does not come from an operator that has started this pod.
        environ = {name: text for name, text in os.environ.items() if name != tf_config.TF_CONFIG or not is_ours}
        for spec in manager.launchers:
            if spec.belongs_here(environ) and (not is_elastic or isinstance(spec.load(), RunsElasticJobs)):
                return spec.name
    if is_elastic:
        return _ELASTIC
    return _HERE if all(map(host_list.is_local, given)) else _ELSEWHERE


def _num_proc(
    ctx: click.Context, options: Mapping[str, Any], hosts: tuple[Host, ...], environ: Mapping[str, str]
) -> int:
    """Return the number of ranks; where it is not given, that of the slots, else of this host's devices or cores."""
    if options["num_proc"] is not None:
        return int(options["num_proc"])
    if elastic_options.is_elastic(options) and not (hosts and options["hosts"] is None and options["hostfile"] is None):
        parameter = next(each for each in ctx.command.params if each.name == "num_proc")
        raise click.MissingParameter(ctx=ctx, param=parameter)
    if hosts:
        return sum(host.slots for host in hosts)
    devices = visible_devices(environ)
    number, what = (devices, "devices") if devices else (machine.usable_cores(), "cores")
    if not options["quiet"]:
        click.echo(f"unidist: -np is not given: {number}, the number of this machine's {what}", err=True)
    return number


def _remote_shell(options: Mapping[str, Any]) -> RemoteShell:
    return RemoteShell(
        command=options["ssh_command"] or "ssh",
        port=options["ssh_port"],
        identity_file=options["ssh_identity_file"],
    )


def _warn_of_variables(environ: Mapping[str, str], settings: Settings) -> None:
    for warning in horovodrun.warnings_of_variables(environ, engine=settings.engine):
        click.echo(f"unidist: warning: {warning}", err=True)
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


horovodrun.accept_flags(launch)
torchrun.refuse_flags(launch)
