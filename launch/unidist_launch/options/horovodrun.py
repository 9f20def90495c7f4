"""Flags and variables of `horovodrun` for which `unidist launch` has no option.

A flag of horovodrun 0.28.1 is one of three things: an option of `unidist launch` under the same name
(`launch_options.py`), refused by name (`REFUSED`), or the wish for something that is so anyway (`ALREADY_SO`).
docs/horovod.md lists all, and a test compares both with the installed Horovod.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import click

from unidist.errors import ConfigurationError

_AUTOTUNE = (
    "the search of --autotune has no such knob: it leaves 3 updates out after each change and measures the next 12. "
    "Leave it out."
)
_ALGORITHM = "there is no such switch here. Use --allreduce-algorithm NAME, or leave the choice to the engine."
_MPI = "MPI does not start the ranks here. Use mpirun itself: `mpirun ... python train.py`; init() works under it."

REFUSED: dict[tuple[str, ...], str] = {
    ("--hierarchical-allreduce",): _ALGORITHM,
    (
        "--hierarchical-allgather",
    ): "there is no such switch here; on one host there is nothing to divide. Leave it out.",
    ("--torus-allreduce",): _ALGORITHM,
    ("--autotune-warmup-samples",): _AUTOTUNE,
    ("--autotune-steps-per-sample",): _AUTOTUNE,
    ("--autotune-bayes-opt-max-samples",): _AUTOTUNE,
    ("--autotune-gaussian-process-noise",): _AUTOTUNE,
    ("--mpi",): _MPI,
    ("--mpi-args",): _MPI,
    ("--mpi-threads-disable",): _MPI,
    (
        "--jsrun",
    ): "jsrun does not start the ranks here. Use jsrun or mpirun itself: init() works under mpirun and srun.",
    (
        "--binding-args",
    ): "these are arguments of mpirun. Put a tool that binds before the command: `taskset -c 0-7 ...`.",
    ("--num-nccl-streams",): "NCCL's own choice is kept. With --engine horovod, use --env HOROVOD_NUM_NCCL_STREAMS=N.",
    ("--thread-affinity",): (
        "unidist has no thread that runs all the time. Bind the rank with `taskset`; with --engine horovod, "
        "use --env HOROVOD_THREAD_AFFINITY=CORES."
    ),
    ("--gloo-timeout-seconds",): (
        "use --timeout SECONDS, which also limits the wait for a slow rank (Horovod waits for that without limit); "
        "with --engine horovod, use --env HOROVOD_GLOO_TIMEOUT_SECONDS=N."
    ),
}
"""Names of each refused flag, and what to use instead."""

_REFUSED_SWITCHES = frozenset(
    {
        "--hierarchical-allreduce",
        "--hierarchical-allgather",
        "--torus-allreduce",
        "--mpi",
        "--mpi-threads-disable",
        "--jsrun",
    }
)
"""Those that take no value."""

ALREADY_SO: dict[str, str] = {
    "--disable-cache": "checks are made on every call; nothing is remembered between calls",
    "--no-hierarchical-allreduce": "the flag that it takes back is refused",
    "--no-hierarchical-allgather": "the flag that it takes back is refused",
    "--no-torus-allreduce": "the flag that it takes back is refused",
    "--no-mpi-threads-disable": "the flag that it takes back is refused",
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


def accept_flags(command: click.Command) -> click.Command:
    """Give `command` a hidden option for every flag in `REFUSED` and `ALREADY_SO`."""
    for names, advice in REFUSED.items():
        command.params.append(
            click.Option(
                [*names],
                is_flag=True if not _REFUSED_SWITCHES.isdisjoint(names) else None,  # False: a value may be left out
                hidden=True,
                expose_value=False,
                is_eager=True,
                callback=_refusal(names[-1], advice),
            )
        )
    for name in ALREADY_SO:
        command.params.append(click.Option([name], is_flag=True, hidden=True, expose_value=False))
    return command


def refusals() -> dict[str, str]:
    """Return the sentence that refuses it, by long name of the flag without its dashes."""
    return {
        name.removeprefix("--"): _sentence(names[-1], advice)
        for names, advice in REFUSED.items()
        for name in names
        if name.startswith("--")
    }


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
    """Return a sentence for each of Horovod's variables that is set, not to 0, and has no effect."""
    if engine == "horovod":
        return []
    return [
        f"variable {name}={environ[name]} has an effect with --engine horovod only: {advice}"
        for name, advice in WITHOUT_EFFECT.items()
        if environ.get(name, "0") not in ("", "0")
    ]


def _refusal(name: str, advice: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def refuse(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value not in (None, False):
            raise ConfigurationError(_sentence(name, advice))

    return refuse


def _sentence(name: str, advice: str) -> str:
    return f"{name} of horovodrun: {advice}"
