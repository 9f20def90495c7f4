"""NVIDIA devices of this host, found without a framework, and which of them a rank uses.

A process sees the devices that its driver shows, as far as CUDA_VISIBLE_DEVICES lists them. The launcher leaves that
variable alone: all ranks of a host see the same devices, and each uses the one of its local rank. A script or a batch
system may instead show each rank its own device only; that is then device 0. With NCCL_MULTI_RANK_GPU_ENABLE=1 ranks
share devices where there are too few.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from unidist.errors import ConfigurationError
from unidist.topology import Topology

__all__ = ["device_index", "installed_devices", "num_visible", "ranks_may_share", "visible_devices"]

_NVML = "libnvidia-ml.so.1"
_PROC = Path("/proc/driver/nvidia/gpus")


def installed_devices(*, library: str = _NVML, listing: Path = _PROC) -> int:
    """Return the number of devices that the NVIDIA driver shows to this process, whatever CUDA_VISIBLE_DEVICES says.

    Takes milliseconds, and does not initialize CUDA, which would spoil it for children that are forked later.

    Args:
        library: NVIDIA's management library, by file name.
        listing: where the driver lists its devices; read if the library is not there, or fails.
    """
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL(library)
        if nvml.nvmlInit_v2() == 0:
            count = ctypes.c_uint(0)
            failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
            nvml.nvmlShutdown()
            if not failed:
                return count.value
    try:
        return sum(1 for _ in listing.iterdir())
    except OSError:
        return 0


def num_visible(listed: str | None, installed: int) -> int:
    """Return how many devices a process sees, as CUDA counts them.

    Args:
        listed: its CUDA_VISIBLE_DEVICES; None if there is no such variable.
        installed: number of devices that the driver shows.
    """
    if listed is None:
        return installed
    seen: list[str] = []
    for item in listed.split(","):
        name = item.strip()
        if name in seen:
            return 0  # CUDA shows none at all if one is listed twice
        is_known = name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < installed)
        if not is_known:
            break  # CUDA ends the list at the first name that is no device
        seen.append(name)
    return len(seen) if installed else 0


def visible_devices(environ: Mapping[str, str] | None = None) -> int:
    """Return how many devices a process of this host with this environment sees; default: this process."""
    env = os.environ if environ is None else environ
    return num_visible(env.get("CUDA_VISIBLE_DEVICES"), installed_devices())


def ranks_may_share(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether several ranks may use one device, as NCCL 2.30 and newer can if this variable allows it."""
    return (os.environ if environ is None else environ).get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def device_index(
    topology: Topology, *, visible: int, installed: int | None = None, environ: Mapping[str, str] | None = None
) -> int | None:
    """Return the index of the device that a rank uses, among those that it sees; None if it sees none.

    Args:
        topology: the rank's place.
        visible: number of devices that the rank sees.
        installed: number of devices of its host; default: asked for where it matters.
        environ: the rank's environment; default: this process's.

    Raises:
        ConfigurationError: the rank sees some devices, but fewer than its host has ranks.
    """
    if not visible:
        return None
    if topology.local_size <= visible:
        return topology.local_rank
    env = os.environ if environ is None else environ
    if ranks_may_share(env):
        return topology.local_rank % visible
    if visible == 1:  # if each rank is shown its own: an engine that needs that checks that no two are the same
        is_slice = env.get("CUDA_VISIBLE_DEVICES", "").strip().startswith("MIG-")  # of which a device has several
        if is_slice or topology.local_size <= (installed_devices() if installed is None else installed):
            return 0
    raise ConfigurationError(
        f"rank {topology.rank} sees {visible} CUDA device(s), and its host runs {topology.local_size} ranks: there is "
        f"no device for each. Start at most {visible} ranks on this host (-np, or slots of -H), let ranks share "
        "devices with NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), or hide the devices from the ranks with "
        "CUDA_VISIBLE_DEVICES= to train on the CPU."
    )
