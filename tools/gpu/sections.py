"""The sections, in the order of what they prove: each is a command with a time limit."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

REHEARSED = ("data", "zero=1", "zero=2", "zero=3")
STRATEGIES = (
    *REHEARSED, "accumulate=2,zero=2", "precision=bf16", "precision=bf16,zero=2",
    "precision=fp16,zero=3", "clip_norm=0.5", "clip_norm=0.5,zero=2", "activations=recompute",
)  # fmt: skip
ON_GPU = ("activations=offload", "zero=1:offload=host", "zero=2:offload=host", "zero=3:offload=host")
SIDES = ("plain", "data", "DDP", "zero=2", "zero=3", "FSDP2", "clip_norm=1.0", "precision=bf16,zero=2")
TESTS = (
    "tests/adapters/unidist_torch/engines/test_cuda.py",
    "tests/plugins/unidist_zero/_torch/parameters/test_offload.py",
    "tests/plugins/unidist_activations/test_torch.py",
)
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
"""Several ranks of NCCL on one GPU."""


@dataclass(frozen=True)
class Section:
    """A part of the proof.

    Args:
        name: of its result's file, too.
        limit_sec: longest time.
        command: to run in the root of the sources.
        variables: added to its environment.
        obstacle: why it cannot run here; "": it can.
    """

    name: str
    limit_sec: float
    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    obstacle: str = ""


@dataclass(frozen=True)
class Machine:
    """The machine that the sections run on.

    Args:
        num_gpus: that PyTorch sees; 0: a rehearsal on the CPU.
        may_share: NCCL connects several ranks on one GPU.
        has_jax: JAX is installed.
        preload: library of NCCL to load instead of PyTorch's own; "": none.
    """

    num_gpus: int
    may_share: bool
    has_jax: bool
    preload: str = ""

    @property
    def is_rehearsal(self) -> bool:
        """Whether there is no GPU."""
        return self.num_gpus == 0

    @property
    def largest(self) -> int:
        """Number of ranks in tests that need several: 2 if they can be connected."""
        return 1 if self.obstacle(2) else 2

    def obstacle(self, ranks: int) -> str:
        """Return why so many ranks cannot be connected by NCCL; "": they can, or this is a rehearsal."""
        if self.is_rehearsal or self.may_share or ranks <= self.num_gpus:
            return ""
        return f"{self.num_gpus} GPU(s) for {ranks} ranks, and NCCL is older than 2.30: set NCCL_SO to a newer one"

    def variables(self, ranks: int) -> dict[str, str]:
        """Return what so many ranks need in their environment."""
        found = {"LD_PRELOAD": self.preload} if self.preload else {}
        return found | (SHARED if self.num_gpus and ranks > self.num_gpus else {})


def sections(machine: Machine, out: Path) -> list[Section]:
    """Return the sections for a machine.

    Args:
        machine: that they run on.
        out: folder for results.
    """
    plain = machine.is_rehearsal
    strategies = REHEARSED if plain else (*STRATEGIES, *ON_GPU)
    sides = ("plain", "data", "DDP", "zero=3", "FSDP2") if plain else SIDES
    size = ("32", "2") if plain else ("2048", "16")
    needs_gpu = "needs a GPU" if plain else ""
    sanitizer = shutil.which("compute-sanitizer")

    patience = 3 if plain else 1  # of machines that are loaded

    def alone(name: str, limit_sec: float, *command: str, obstacle: str = "") -> Section:
        return Section(name, patience * limit_sec, (sys.executable, *command), machine.variables(1), obstacle)

    def result(name: str) -> str:
        return str(out / f"{name}.json")

    def job(ranks: int, name: str, limit_sec: float, *check: str, launch: Sequence[str] = ()) -> Section:
        options = ("-np", str(ranks), *(() if plain else ("--engine", "nccl")), *launch)
        script = (sys.executable, "-m", "tools.gpu.checks", result(name), *check)
        command = (sys.executable, "-m", "unidist_launch", "launch", *options, *script)
        return Section(name, patience * limit_sec, command, machine.variables(ranks), machine.obstacle(ranks))

    pytest = ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *TESTS)
    checked = (sys.executable, "-m", "tools.gpu.checks", result("sanitizer"), "equality", "data", "zero=2")
    return [
        alone("environment", 60, "-m", "tools.gpu.checks", result("environment"), "environment"),
        alone("doctor", 60, "-m", "unidist_launch", "doctor"),
        job(1, "equality-1", 120, "equality", *strategies),
        job(2, "equality-2", 120, "equality", *strategies),
        job(4, "equality-4", 120, "equality", *REHEARSED),
        job(2, "delayed-2", 60, "delayed", *REHEARSED),
        job(2, "context-2", 60, "context_ring"),
        job(2, "pipeline-2", 60, "pipelines", "1f1b", "zb-h1", "interleaved"),
        job(4, "pipeline-4", 60, "pipelines", "1f1b", "zb-h1"),
        Section("tests", 150, (sys.executable, *pytest), machine.variables(machine.largest)),
        job(2, "killed-2", 90, "killed", str(out), launch=("--min-np", "1", "--max-np", "2")),
        job(1, "wrong-index", 60, "wrong_index"),
        job(1, "steps-1", 120, "steps", *size, *sides),
        job(2, "steps-2", 120, "steps", *size, "data", "DDP", "zero=3", "FSDP2"),
        job(2, "overlap-2", 60, "overlap", *size, "data"),
        job(2, "overlap-2-ddp", 60, "overlap", *size, "DDP"),
        job(1, "compiled", 90, "compiled"),
        alone(
            "jax",
            90,
            *("-m", "tools.gpu.jax_checks", result("jax")),
            obstacle="" if machine.has_jax else "JAX is not installed",
        ),
        Section(
            "sanitizer",
            120,
            (str(sanitizer), "--error-exitcode", "3", *checked),
            machine.variables(1),
            needs_gpu or ("" if sanitizer else "compute-sanitizer is not installed"),
        ),
        alone("bench", 150, "-m", "benchmarks.gpu", "-np", "1", "--repetitions", "8", obstacle=needs_gpu),
    ]
