"""The allocation of Slurm: nodes and slots, from its variables. Pure, but for asking `scontrol` to spell out names."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping

from unidist.errors import ConfigurationError
from unidist.launcher import Host

MARKER = "SLURM_JOB_NODELIST"
"""Set by salloc and sbatch for everything that runs inside of an allocation."""

_ASK_SEC = 30.0
_NAME = re.compile(r"\w[\w.-]*")
_COUNT = re.compile(r"([1-9][0-9]*)(?:\(x([1-9][0-9]*)\))?")

Expand = Callable[[str], tuple[str, ...]]
"""Spells out a node list: "n[1-3]" is n1, n2, n3."""


def read(environ: Mapping[str, str], expand: Expand) -> tuple[Host, ...]:
    """Return the nodes of the allocation that this process runs in, and the tasks that each may have.

    That is what the user asked for by --ntasks and the like; without it as many as CPUs, by --cpus-per-task.

    Raises:
        ConfigurationError: this is no allocation, or a task of a job step, or the variables cannot be read.
    """
    if MARKER not in environ:
        raise ConfigurationError(
            "the launcher slurm needs an allocation, and this is none (SLURM_JOB_NODELIST is not set). Run `unidist "
            "launch` in a script for sbatch (`unidist slurm script` writes one) or inside of `salloc`."
        )
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise ConfigurationError(
            f"this is task {environ.get('SLURM_PROCID', '?')} of {environ['SLURM_STEP_NUM_TASKS']} that srun has "
            "started, and each of them would start the whole job. Run `unidist launch` once, without srun; or the "
            "script itself by srun, on one node: `srun python train.py`. For a job of one node: --launcher local."
        )
    names = expand(environ[MARKER])
    slots = _slots(environ, len(names))
    return tuple(Host(name, number) for name, number in zip(names, slots, strict=True))


def expand_by_scontrol(text: str) -> tuple[str, ...]:
    """Return the names of a node list, as Slurm's own tool spells it out.

    Raises:
        ConfigurationError: the tool is missing or fails, or its answer holds no names.
    """
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=_ASK_SEC, check=True
        )
    except FileNotFoundError:
        raise ConfigurationError(
            "this is an allocation of Slurm, but there is no `scontrol` on the PATH, which spells out its node list; "
            "add Slurm's programs to the PATH, or choose another launcher: --launcher."
        ) from None
    except subprocess.CalledProcessError as exc:
        raise ConfigurationError(f"`scontrol show hostnames {text}` failed: {exc.stderr.strip()}") from exc
    except subprocess.TimeoutExpired as exc:
        raise ConfigurationError(f"`scontrol show hostnames {text}` did not answer in {_ASK_SEC:g} seconds") from exc
    names = tuple(done.stdout.split())
    if not names or not all(map(_NAME.fullmatch, names)) or len(set(names)) < len(names):
        raise ConfigurationError(
            f"SLURM_JOB_NODELIST={text!r} is no node list: scontrol makes {' '.join(names) or 'nothing'} of it. "
            "Slurm sets this variable; was it changed?"
        )
    return names


def counts(text: str) -> tuple[int, ...]:
    """Return the numbers of "2(x3),1": 2, 2, 2, 1.

    Raises:
        ValueError: it is no such list.
    """
    found: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            raise ValueError(text)
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _slots(environ: Mapping[str, str], num_nodes: int) -> tuple[int, ...]:
    name = "SLURM_TASKS_PER_NODE" if "SLURM_TASKS_PER_NODE" in environ else "SLURM_JOB_CPUS_PER_NODE"
    text = environ.get(name, "")
    try:
        found = counts(text)
    except ValueError:
        raise ConfigurationError(f"{name}={text!r} cannot be read; Slurm writes it like 2(x3),1.") from None
    if len(found) != num_nodes:
        raise ConfigurationError(
            f"{name}={text!r} speaks of {len(found)} nodes, {MARKER}={environ[MARKER]!r} of {num_nodes}; were they "
            "changed?"
        )
    per_task = environ.get("SLURM_CPUS_PER_TASK", "1")
    if name == "SLURM_TASKS_PER_NODE" or not per_task.isdigit() or int(per_task) < 1:
        return found
    return tuple(max(1, number // int(per_task)) for number in found)
