"""A driver's management library with as many devices as a test wants."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["build_nvml"]


def build_nvml(folder: Path, *, num_devices: int, fails: bool = False) -> Path:
    """Build libnvidia-ml.so.1 with the three functions that unidist calls; skips the test without a C compiler.

    Args:
        folder: gets the library; in LD_LIBRARY_PATH it stands for the driver.
        num_devices: that it counts.
        fails: counting returns an error.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source = folder / "nvml.c"
    source.write_text(
        "int nvmlInit_v2(void) { return 0; }\n"
        "int nvmlShutdown(void) { return 0; }\n"
        f"int nvmlDeviceGetCount_v2(unsigned *n) {{ *n = {num_devices}; return {int(fails)}; }}\n"
    )
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return library
