"""Tests over several processes: none may leave anything behind. Those on simulated devices have ranks in threads."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _nothing_stays(leak_check: None) -> None:
    """Every test here is checked for leaks."""


@pytest.fixture(scope="session")
def simulation() -> None:
    """Do what PyTorch does once in a process, and leaves behind: for the first optimizer, and the first store."""
    torch = pytest.importorskip("torch", reason="the simulated devices are PyTorch's")
    importlib.import_module("torch._dynamo")
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture(params=("early", "late"))
def machine(request: pytest.FixtureRequest, simulation: None) -> Iterator[Any]:
    """Simulated devices, in each order of streams, for which engine nccl works."""
    from simulated_device import Machine
    from simulated_training import nccl

    with Machine(order=request.param) as made, nccl(made):
        yield made
