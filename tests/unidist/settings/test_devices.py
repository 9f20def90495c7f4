"""Devices found without a framework, and the one of each rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvidia_driver import build_nvml

from unidist.errors import ConfigurationError
from unidist.settings import device_index, installed_devices, num_visible
from unidist.topology import Topology

NOWHERE = "libnvidia-ml.so.of-nobody"


def test_the_driver_counts_devices(tmp_path: Path) -> None:
    listing = tmp_path / "gpus"
    assert installed_devices(library=NOWHERE, listing=listing) == 0
    for place in ("0000:07:00.0", "0000:0f:00.0"):
        (listing / place).mkdir(parents=True)
    assert installed_devices(library=NOWHERE, listing=listing) == 2
    assert installed_devices(library=str(build_nvml(tmp_path, num_devices=3)), listing=listing) == 3


def test_a_library_that_fails_leaves_the_listing(tmp_path: Path) -> None:
    (tmp_path / "gpus" / "0000:07:00.0").mkdir(parents=True)
    library = str(build_nvml(tmp_path, num_devices=9, fails=True))
    assert installed_devices(library=library, listing=tmp_path / "gpus") == 1


@pytest.mark.parametrize(
    ("listed", "installed", "number"),
    [
        (None, 4, 4),
        ("", 4, 0),
        ("-1", 4, 0),
        ("2,0", 4, 2),
        (" 3 , 1", 4, 2),
        ("0,7,1", 4, 1),  # the list ends at the first that is no device
        ("0,-1,1", 4, 1),
        ("1,1", 4, 0),
        ("GPU-3f2a,GPU-77b1", 4, 2),
        ("MIG-3f2a", 1, 1),
        ("0,1", 0, 0),
    ],
)
def test_visible_devices_are_counted_as_cuda_counts_them(listed: str | None, installed: int, number: int) -> None:
    assert num_visible(listed, installed) == number


def place(local_rank: int, local_size: int) -> Topology:
    return Topology(local_rank, local_size, local_rank, local_size)


def test_each_rank_uses_the_device_of_its_local_rank() -> None:
    assert [device_index(place(rank, 3), visible=4, installed=4) for rank in range(3)] == [0, 1, 2]
    second_host = Topology(rank=3, world_size=4, local_rank=1, local_size=2, node_rank=1, num_nodes=2)
    assert device_index(second_host, visible=2, installed=2) == 1
    assert device_index(place(1, 2), visible=0, installed=4) is None


def test_a_rank_that_is_shown_its_own_device_alone_uses_that() -> None:
    assert [device_index(place(rank, 3), visible=1, installed=3) for rank in range(3)] == [0, 0, 0]


def test_ranks_share_devices_where_the_user_allows_it() -> None:
    environ = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    assert [device_index(place(rank, 3), visible=2, installed=2, environ=environ) for rank in range(3)] == [0, 1, 0]
    assert device_index(place(1, 2), visible=2, installed=2, environ=environ) == 1
    assert device_index(place(1, 2), visible=0, environ=environ) is None


def test_a_rank_that_is_shown_a_slice_of_a_device_uses_that() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-3f2a"}
    assert [device_index(place(rank, 3), visible=1, installed=1, environ=environ) for rank in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(("visible", "installed"), [(1, 1), (2, 2), (2, 8)])
def test_too_few_devices_are_an_error(visible: int, installed: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"rank 2 sees {visible} CUDA device.* runs 3 ranks"):
        device_index(place(2, 3), visible=visible, installed=installed)
