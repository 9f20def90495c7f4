"""Builds, caches, installs and tries Horovod for the frameworks that are installed. pip does the work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import click

from unidist.errors import ConfigurationError
from unidist.installation import install_command
from unidist_launch.display import machine
from unidist_launch.horovod_build import sources as horovod_sources
from unidist_launch.horovod_build.steps import Steps
from unidist_launch.horovod_build.wheel_cache import WheelCache

VERSION = "0.28.1"
REVISION = 1
"""Grows when a wheel comes out differently for the same frameworks: other changes, another compile option."""

_TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm", "tf-nightly")
_NEEDS = {"cloudpickle": "cloudpickle", "psutil": "psutil", "PyYAML": "pyyaml", "packaging": "packaging"}
_BYTES_PER_COMPILER = 3 << 29
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]

_TRY_TORCH = """
import torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((1000,), float(hvd.rank() + 1)), op=hvd.Sum, name="unidist")
assert hvd.size() == 2 and (total == 3).all(), total
hvd.shutdown()
"""
_TRY_TENSORFLOW = """
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
total = hvd.allreduce(tf.fill((1000,), float(hvd.rank() + 1)), op=hvd.Sum, name="unidist")
assert hvd.size() == 2 and bool(tf.reduce_all(total == 3)), total
hvd.shutdown()
"""


@dataclass(frozen=True)
class Wanted:
    """The target of a build of Horovod.

    Args:
        torch: version of the installed PyTorch, or "".
        tensorflow: version of the installed TensorFlow, or "".
        mpi: with MPI.
        nccl: with NCCL.
    """

    torch: str
    tensorflow: str
    mpi: bool = False
    nccl: bool = False

    @classmethod
    def here(cls, *, mpi: bool = False, nccl: bool = False) -> Wanted:
        """Return what fits this environment. Imports no framework."""
        return cls(_installed("torch"), next(filter(None, map(_installed, _TENSORFLOW)), ""), mpi, nccl)

    @property
    def version(self) -> str:
        """The version of the wheel, whose local part says what it was built for."""
        parts = [f"torch{_public(self.torch)}"] if self.torch else []
        parts += [f"tensorflow{_public(self.tensorflow)}"] if self.tensorflow else []
        parts += ["mpi"] if self.mpi else []
        parts += ["nccl"] if self.nccl else []
        return f"{VERSION}+{'.'.join(parts)}"

    @property
    def frameworks(self) -> str:
        """The frameworks, for messages."""
        named = (("PyTorch", self.torch), ("TensorFlow", self.tensorflow))
        return " and ".join(f"{name} {version}" for name, version in named if version)

    def is_met_by(self, installed: str) -> bool:
        """Return whether an installed version is what is wanted, with or without more than that."""
        extras = {"mpi", "nccl"}
        found, wanted = installed.split("."), self.version.split(".")
        return set(wanted) <= set(found) and [part for part in found if part not in extras] == [
            part for part in wanted if part not in extras
        ]

    def environment(self, tools: str, cmake: str) -> dict[str, str]:
        """Return the environment of the compilation."""
        env = dict(os.environ) | {
            "PYTHONPATH": tools,
            "HOROVOD_CMAKE": cmake,
            "HOROVOD_WITH_GLOO": "1",
            f"HOROVOD_WITH{'' if self.mpi else 'OUT'}_MPI": "1",
            f"HOROVOD_WITH{'' if self.torch else 'OUT'}_PYTORCH": "1",
            f"HOROVOD_WITH{'' if self.tensorflow else 'OUT'}_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_LOCAL_VERSION": self.version.partition("+")[2],
        }
        if self.nccl:
            env["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        env.setdefault("MAKEFLAGS", f"-j{_num_compilers()}")
        return env


def run(wanted: Wanted, *, force: bool, wheel_only: bool, cache_dir: Path | None, timeout: timedelta) -> None:
    """Do what `unidist build horovod` does.

    Raises:
        ConfigurationError: something is missing or failed; with the log's path, if there is one.
    """
    installed = _installed("horovod")
    if not force and not wheel_only and wanted.frameworks and wanted.is_met_by(installed):
        click.echo(f"Horovod {installed} is installed, and fits {wanted.frameworks}. (--force builds it again)")
        return
    if not wanted.frameworks:
        raise ConfigurationError(
            f"neither PyTorch nor TensorFlow is installed for {sys.executable}, so there is nothing to build Horovod "
            f"for. Install one first: {install_command('unidist-train[torch]')}, or "
            f"{install_command('unidist-train[tensorflow]')}"
        )
    if importlib.util.find_spec("pip") is None:
        raise ConfigurationError(f"{sys.executable} has no pip, which does the work; get it: python -m ensurepip")
    cache = WheelCache(cache_dir, revision=REVISION)
    with cache.locked(timeout=timeout, say=_say):
        steps = Steps(cache.folder / "logs" / f"horovod-{wanted.version}.log", timeout=timeout, say=_say)
        wheel = None if force else cache.find("horovod", wanted.version)
        if wheel is None:
            wheel = _build(wanted, cache, steps)
        else:
            _say(f"Horovod {wanted.version} was built before: {wheel}")
    if wheel_only:
        click.echo(str(wheel))
        return
    _install(wheel, steps)
    _try(wanted, steps)
    click.echo(f"Horovod {wanted.version} is installed, and all-reduces between two processes.")


def _build(wanted: Wanted, cache: WheelCache, steps: Steps) -> Path:
    _check_programs(wanted)
    _say(
        f"Building Horovod {VERSION} for {wanted.frameworks}. This takes about 9 minutes on 2 cores (here: "
        f"{machine.usable_cores()}), once.\nThe log is {steps.log}"
    )
    with tempfile.TemporaryDirectory(prefix="unidist-horovod-") as name:
        folder = Path(name)
        tools, cmake = _get_tools(folder, steps)
        sources = _get_sources(folder, tools, steps)
        horovod_sources.apply(sources)
        steps.run(
            "compiling Horovod",
            [*_PIP, "wheel", "-v", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder / "out"), "."],
            env=wanted.environment(tools, cmake),
            cwd=sources,
            failure="Horovod does not compile here.",
        )
        found = list((folder / "out").glob("*.whl"))
        if len(found) != 1:
            raise ConfigurationError(f"pip made {len(found)} wheels of Horovod instead of one. {steps.explanation()}")
        return cache.store(found[0])


def _check_programs(wanted: Wanted) -> None:
    compiler = os.environ.get("CXX", "c++").split()[0]
    needed = {compiler: "a C++ compiler (apt-get install g++)", "make": "make (apt-get install make)"}
    if wanted.mpi:
        needed["mpicxx"] = "MPI's compiler wrapper (apt-get install libopenmpi-dev), or leave --mpi out"
    if wanted.nccl and not any(os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME")):
        needed["nvcc"] = "the CUDA toolkit (or set HOROVOD_CUDA_HOME), or leave --nccl out"
    for program, what in needed.items():
        if shutil.which(program) is None:
            raise ConfigurationError(f"Horovod cannot be built: {program} is not on the PATH. Install {what}.")


def _get_tools(folder: Path, steps: Steps) -> tuple[str, str]:
    """Install the build tools into separate folders, never into the user's environment.

    Returns:
        what PYTHONPATH must be for them, and the path of cmake.
    """
    tools, other = folder / "tools", folder / "cmake"  # pip fills a `bin` folder once
    why = "pip could not install the build tools. Is there a network, or a proxy to name?"
    packages = ["setuptools<81", "wheel", "packaging"]
    install = [*_PIP, "install", "--target"]
    steps.run("getting build tools", [*install, str(tools), *packages], env=os.environ, cwd=folder, failure=why)
    cmake = os.environ.get("HOROVOD_CMAKE", "")
    if not cmake:
        why = "pip could not install cmake below version 4. With HOROVOD_CMAKE=/path/to/cmake one of yours is used."
        steps.run("getting cmake", [*install, str(other), "cmake<4"], env=os.environ, cwd=folder, failure=why)
        cmake = str(other / "bin" / "cmake")
    if shutil.which(cmake) is None:
        raise ConfigurationError(
            f"there is no program {cmake}, though it should be the cmake that "
            f"{'HOROVOD_CMAKE names' if 'HOROVOD_CMAKE' in os.environ else 'pip has installed'}. {steps.explanation()}"
        )
    return f"{tools}{os.pathsep}{other}", cmake


def _get_sources(folder: Path, tools: str, steps: Steps) -> Path:
    steps.run(
        "getting Horovod's sources",
        [*_PIP, "download", "--no-binary", ":all:", "--no-deps", "--no-build-isolation", f"horovod=={VERSION}"],
        env=dict(os.environ) | {"PYTHONPATH": tools},
        cwd=folder,
        failure=f"pip could not get the sources of Horovod {VERSION}. Is there a network, or a proxy to name?",
    )
    with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"horovod-{VERSION}"


def _install(wheel: Path, steps: Steps) -> None:
    needs = [requirement for name, requirement in _NEEDS.items() if not _installed(name)]
    for title, arguments in (
        ("installing Horovod", ["--no-deps", "--force-reinstall", str(wheel)]),
        ("installing what Horovod needs", needs),
    ):
        if arguments:
            command = [*_PIP, "install", *arguments]
            steps.run(title, command, env=os.environ, cwd=wheel.parent, failure=f"{title} failed.")


def _try(wanted: Wanted, steps: Steps) -> None:
    """All-reduce between two fresh processes, by Horovod's own starter, with each binding."""
    for name, version, script in (
        ("PyTorch", wanted.torch, _TRY_TORCH),
        ("TensorFlow", wanted.tensorflow, _TRY_TENSORFLOW),
    ):
        if version:
            starter = "from horovod.runner.launch import run_commandline; run_commandline()"
            steps.run(
                f"trying Horovod with {name}",
                [sys.executable, "-c", starter, "-np", "2", "--gloo", sys.executable, "-c", script],
                env={key: value for key, value in os.environ.items() if not key.startswith("HOROVOD_")},
                cwd=steps.log.parent,
                failure=f"Horovod is installed, but an all-reduce of {name} tensors between two processes failed.",
            )


def _num_compilers() -> int:
    """Return how many compilers may run at a time: as many as there are cores and memory for."""
    return max(1, min(machine.usable_cores(), machine.memory_bytes()[1] // _BYTES_PER_COMPILER))


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _public(version: str) -> str:
    return version.partition("+")[0]


def _say(text: str) -> None:
    click.echo(text, err=True)
