"""`python -m tools.demo_packages torch`: says what `make demo` installs, and prints the options of pip for it.

Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
ANSWER_SEC = 10
"""So long may an index take to answer before it counts as out of reach."""


def has_gpu() -> bool:
    """Whether this machine has a GPU of NVIDIA's that works."""
    if shutil.which("nvidia-smi") is None:
        return False
    return subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, timeout=60, check=False).returncode == 0


def index_has_cpu_build(pip: Sequence[str]) -> bool:
    """Whether the indexes and folders that pip is configured for have a build of PyTorch for CPUs."""
    command = [*pip, "--disable-pip-version-check", "index", "versions", "torch"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return "+cpu" in found.stdout


def cpu_index_answers() -> bool:
    """Whether PyTorch's index of builds for CPUs can be reached."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=ANSWER_SEC):
            return True
    except OSError:
        return False


def chosen(
    extra: str, *, gpu: Callable[[], bool], has_cpu_build: Callable[[], bool], index_answers: Callable[[], bool]
) -> tuple[str, list[str]]:
    """Return what is said before anything is downloaded, and the options of pip.

    Args:
        extra: of setup.cfg, "torch", "tensorflow" or "jax".
        gpu: `has_gpu`.
        has_cpu_build: `index_has_cpu_build`.
        index_answers: `cpu_index_answers`.
    """
    if extra != "torch":
        return SIZES[extra], []
    if gpu():
        return f"{SIZES['torch']}, for the GPU that is here", []
    if has_cpu_build():
        return SIZES["torch-cpu"], []
    if index_answers():
        return f"{SIZES['torch-cpu']} from {CPU_INDEX}", ["--extra-index-url", CPU_INDEX]
    return f"{SIZES['torch']}; there is no GPU, but {CPU_INDEX} does not answer", []


# Of version 0.2.0 on Python 3.11, in November 2026: what pip's report lists, and what lies in site-packages.
SIZES = {
    "torch": "2.8 GB (5 GB on disk): PyTorch's build with CUDA, and the example's libraries",
    "torch-cpu": "0.3 GB (1 GB on disk): PyTorch's build for CPUs, and the example's libraries",
    "tensorflow": "0.4 GB (1.8 GB on disk): TensorFlow, and the example's libraries",
    "jax": "0.2 GB (0.8 GB on disk): JAX, and the example's libraries",
}


def main(extra: str, pip: Sequence[str]) -> None:
    """Say it on standard error, and print the options."""
    said, options = chosen(
        extra, gpu=has_gpu, has_cpu_build=lambda: index_has_cpu_build(pip), index_answers=cpu_index_answers
    )
    print(f"make demo downloads {said}", file=sys.stderr)
    print(" ".join(options))


if __name__ == "__main__":
    main(sys.argv[1], [sys.argv[2], "-m", "pip"])
