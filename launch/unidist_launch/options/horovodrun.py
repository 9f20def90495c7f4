"""Flags and variables of `horovodrun` for which `unidist launch` has no option.

A flag of horovodrun 0.28.1 is one of three things: an option of `unidist launch` under the same name
(`launch_options.py`), one that tunes Horovod alone (`TUNING`), or the wish for something that is so anyway
(`ALREADY_SO`). None ends a job. docs/horovod.md lists all, and a test compares both with the installed Horovod.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from unidist.settings.environment import MAX_CACHE_CAPACITY
from unidist_launch.options.numbers import Real, Whole

_AUTOTUNE = (
    "the search of --autotune has no such knob: it leaves 3 updates out after each change and measures the next 12."
)
_ALGORITHM = "use --allreduce-algorithm NAME, or leave the choice to the engine."
_MPI = "MPI does not start the ranks. For that use --launcher mpi; for MPI as the carrier of data, --engine mpi."


@dataclass(frozen=True)
class Tuning:
    """A flag that tunes Horovod, or the way in which horovodrun starts ranks, and means nothing to unidist.

    Args:
        names: of the flag, the last one for messages; one that switches it off may follow a slash.
        advice: what to use instead.
        variable: that Horovod reads under `--engine horovod`, where the flag has its effect; "" for none.
        kind: what its value is; None: it takes none.
    """

    names: tuple[str, ...]
    advice: str
    variable: str = ""
    kind: type | None = None

    @property
    def name(self) -> str:
        """The flag, for messages."""
        return self.names[-1].partition("/")[0]

    @property
    def parameter(self) -> str:
        """The name of its value among the options."""
        return self.name.removeprefix("--").replace("-", "_")


def _switch(name: str, advice: str, variable: str) -> Tuning:
    return Tuning((f"--{name}/--no-{name}",), advice, variable)


TUNING = (
    _switch("hierarchical-allreduce", _ALGORITHM, "HOROVOD_HIERARCHICAL_ALLREDUCE"),
    _switch(
        "hierarchical-allgather",
        "the engine decides; on one host there is nothing to divide.",
        "HOROVOD_HIERARCHICAL_ALLGATHER",
    ),
    _switch("torus-allreduce", _ALGORITHM, "HOROVOD_TORUS_ALLREDUCE"),
    Tuning(("--autotune-warmup-samples",), _AUTOTUNE, "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", int),
    Tuning(("--autotune-steps-per-sample",), _AUTOTUNE, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", int),
    Tuning(("--autotune-bayes-opt-max-samples",), _AUTOTUNE, "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", int),
    Tuning(("--autotune-gaussian-process-noise",), _AUTOTUNE, "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", float),
    Tuning(("--mpi",), _MPI),
    Tuning(("--mpi-args",), _MPI, kind=str),
    _switch("mpi-threads-disable", "the engine mpi needs an MPI with threads.", "HOROVOD_MPI_THREADS_DISABLE"),
    Tuning(
        ("--jsrun",), "jsrun does not start the ranks. Start the script by jsrun itself: init() finds its variables."
    ),
    Tuning(
        ("--binding-args",),
        "put a tool that binds before the command: `taskset -c 0-7 ...`; with --launcher mpi, mpirun binds nothing.",
        kind=str,
    ),
    Tuning(("--num-nccl-streams",), "NCCL's own choice is kept.", "HOROVOD_NUM_NCCL_STREAMS", int),
    Tuning(
        ("--thread-affinity",),
        "unidist has no thread that runs all the time. Bind the rank with `taskset`.",
        "HOROVOD_THREAD_AFFINITY",
        int,
    ),
    Tuning(
        ("--gloo-timeout-seconds",),
        "use --timeout SECONDS, which also limits the wait for a slow rank (Horovod waits for that without limit).",
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        int,
    ),
)
"""Flags of horovodrun that have no meaning but for Horovod."""

ALREADY_SO: dict[str, str] = {
    "--disable-cache": "checks are made on every call; nothing is remembered between calls",
    "--gloo": "MPI controls nothing here; for torch's gloo as the engine, give --engine gloo",
}
"""Flags that ask for what is always so here, and why it is: accepted, as nothing is to be done for them."""

WITHOUT_EFFECT: dict[str, str] = {
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _AUTOTUNE,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _AUTOTUNE,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _AUTOTUNE,
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _AUTOTUNE,
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _ALGORITHM,
    "HOROVOD_HIERARCHICAL_ALLGATHER": "on one host there is nothing to divide.",
    "HOROVOD_TORUS_ALLREDUCE": _ALGORITHM,
    "HOROVOD_NUM_NCCL_STREAMS": "NCCL's own choice is kept.",
    "HOROVOD_THREAD_AFFINITY": "bind the rank itself, with `taskset`.",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "use --timeout.",
    "HOROVOD_GLOO_IFACE": "use --network-interfaces.",
    "HOROVOD_CONTROLLER": "unidist has no controller to choose.",
    "HOROVOD_CPU_OPERATIONS": "use --engine.",
    "HOROVOD_MPI_THREADS_DISABLE": "no MPI is used.",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "Adasum needs no MPI here.",
    "HOROVOD_DISABLE_GROUP_FUSION": "use --fusion-threshold-mb 0.",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "the engine decides.",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "the engine decides.",
    "HOROVOD_CCL_CACHE": "no oneCCL is used.",
}
"""Variables by which users tune Horovod, which only Horovod itself reads (`--engine horovod`), and what to do here."""


_TYPES: Mapping[type | None, Whole | Real] = {int: Whole(), float: Real()}


def accept_flags(command: click.Command) -> click.Command:
    """Give `command` a hidden option for every flag in `TUNING` and `ALREADY_SO`."""
    for flag in TUNING:
        is_flag = flag.kind is None
        command.params.append(
            click.Option(
                [*flag.names],
                type=_TYPES.get(flag.kind, flag.kind),
                is_flag=is_flag,
                default=None,
                hidden=True,
                metavar="VALUE",
            )
        )
    for name in ALREADY_SO:
        command.params.append(click.Option([name], is_flag=True, hidden=True, expose_value=False))
    return command


def tuning_variables(options: Mapping[str, Any]) -> dict[str, str]:
    """Return Horovod's variables for the flags that tune it alone."""
    given = {flag.variable: options[flag.parameter] for flag in TUNING if flag.variable}
    return {
        name: str(int(value) if isinstance(value, bool) else value)
        for name, value in given.items()
        if value is not None
    }


def warnings_of_flags(options: Mapping[str, Any], *, engine: str) -> list[str]:
    """Return a sentence for each flag that was given and has no effect."""
    return [
        f"{flag.name} of horovodrun has {_effect(flag)}: {flag.advice}"
        for flag in TUNING
        if options[flag.parameter] not in (None, False) and not (flag.variable and engine == "horovod")
    ]


def _effect(flag: Tuning) -> str:
    return "an effect with --engine horovod only" if flag.variable else "no effect"


def horovod_variables(chosen: Mapping[str, str]) -> dict[str, str]:
    """Return Horovod's variables for what options chose, so that they hold for `--engine horovod` too.

    Not the timeline's: both would write the same file.

    Args:
        chosen: the variables of ours that stand for options.
    """
    variables: dict[str, str] = {}
    same = {
        "UNIDIST_FUSION_THRESHOLD_BYTES": "HOROVOD_FUSION_THRESHOLD",
        "UNIDIST_CYCLE_TIME_MS": "HOROVOD_CYCLE_TIME",
        "UNIDIST_CACHE_CAPACITY": "HOROVOD_CACHE_CAPACITY",
        "UNIDIST_LOG_LEVEL": "HOROVOD_LOG_LEVEL",
    }
    variables |= {theirs: chosen[ours] for ours, theirs in same.items() if ours in chosen}
    if "UNIDIST_LOG_TIMESTAMP" in chosen:
        variables["HOROVOD_LOG_HIDE_TIME"] = "0" if chosen["UNIDIST_LOG_TIMESTAMP"] == "1" else "1"
    if "UNIDIST_STALL_CHECK_SEC" in chosen:
        seconds = math.ceil(float(chosen["UNIDIST_STALL_CHECK_SEC"]))  # Horovod reads whole seconds
        variables["HOROVOD_STALL_CHECK_DISABLE"] = "0" if seconds else "1"
        variables["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(seconds)
    if "UNIDIST_STALL_SHUTDOWN_SEC" in chosen:
        seconds = math.ceil(float(chosen["UNIDIST_STALL_SHUTDOWN_SEC"]))
        variables["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(seconds)
    return variables


def warnings_of_variables(environ: Mapping[str, str], *, engine: str) -> list[str]:
    """Return a sentence for each of Horovod's variables that is set, not to 0, and has no effect or another."""
    found = []
    capacity = environ.get("HOROVOD_CACHE_CAPACITY", "")
    if not environ.get("UNIDIST_CACHE_CAPACITY") and capacity.isdigit() and int(capacity) > MAX_CACHE_CAPACITY:
        found.append(f"variable HOROVOD_CACHE_CAPACITY={capacity}: {MAX_CACHE_CAPACITY} are taken, the most possible")
    if engine == "horovod":
        return found
    return found + [
        f"variable {name}={environ[name]} has an effect with --engine horovod only: {advice}"
        for name, advice in WITHOUT_EFFECT.items()
        if environ.get(name, "0") not in ("", "0")
    ]
