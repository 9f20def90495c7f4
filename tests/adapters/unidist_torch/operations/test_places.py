"""Where named operations find their tensors, and the order of streams around them. "meta" stands for a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unidist_torch.operations.places import place, place_in, queue_behind_caller, queue_caller_behind


class Scope:
    """Of operations that leave the memory of some devices where it is."""

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds

    def moves(self, memory: str) -> bool:
        return memory in self._kinds


HOST_ONLY: Any = Scope()
DEVICES: Any = Scope("meta")


def test_contiguous_host_memory_is_used_as_it_is() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert place(tensor, HOST_ONLY).data_ptr() == tensor.data_ptr()
    placed, copy_back = place_in(tensor, HOST_ONLY)
    assert placed.data_ptr() == tensor.data_ptr()
    assert copy_back is None


def test_other_tensors_are_copied_and_copied_back() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    placed, copy_back = place_in(tensor, HOST_ONLY)
    assert placed.is_contiguous()
    assert torch.equal(placed, tensor)
    placed += 1
    assert copy_back is not None
    copy_back()
    assert torch.equal(tensor, torch.arange(1.0, 7.0).reshape(2, 3).t())


def test_device_memory_stays_where_the_operation_can_use_it() -> None:
    tensor = torch.empty(2, 3, device="meta")
    assert place(tensor, DEVICES).device.type == "meta"
    placed, copy_back = place_in(tensor, DEVICES)
    assert placed.device.type == "meta"
    assert copy_back is None
    for scope, on_host in ((HOST_ONLY, False), (DEVICES, True)):
        with pytest.raises(NotImplementedError, match="meta"):  # has no numbers that could be copied to the host
            place(tensor, scope, on_host=on_host)


def tensor_on_device(log: list[str]) -> Any:
    return SimpleNamespace(is_cpu=False, device="cuda:1", record_stream=lambda stream: log.append(f"keep for {stream}"))


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self} waits for {other}")

    def __str__(self) -> str:
        return self._name


@pytest.mark.parametrize("is_side_stream", [False, True])
def test_operations_are_ordered_between_what_the_caller_queues(
    monkeypatch: pytest.MonkeyPatch, is_side_stream: bool
) -> None:
    log: list[str] = []
    default, side = Stream("default", log), Stream("side", log)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: side if is_side_stream else default)
    tensor = tensor_on_device(log)
    queue_behind_caller(tensor)
    log.append("operation")
    queue_caller_behind(tensor)
    before, after = ["default waits for side", "keep for default"], ["side waits for default", "keep for side"]
    assert log == ([*before, "operation", *after] if is_side_stream else ["operation"])


def test_host_memory_asks_for_no_stream() -> None:
    queue_behind_caller(torch.ones(1))
    queue_caller_behind(torch.ones(1))
