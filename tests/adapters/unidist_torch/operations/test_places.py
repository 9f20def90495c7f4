"""Where named operations find their tensors, and the order of streams around them. "meta" stands for a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unidist_torch.operations.places import place, place_in, stream_order


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
    with pytest.raises(NotImplementedError, match="meta"):  # has no numbers that could be copied to the host
        place(tensor, HOST_ONLY)


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log

    def record_event(self) -> str:
        return f"what {self._name} had then"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self._name} waits for {event}")


def test_an_operation_is_ordered_between_what_its_caller_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    def tensor(name: str) -> Any:
        keep = lambda stream: log.append(f"{name} stays for {stream._name}")  # noqa: E731 - short
        return SimpleNamespace(is_cpu=False, device="cuda:1", record_stream=keep)

    def run_on(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(name, log))

    run_on("caller")
    order = stream_order(tensor("x"))
    assert order is not None
    run_on("operation")
    order.begin()
    order.made(tensor("y"))
    order.end()
    run_on("caller")
    order.follow()
    assert log == [
        *("operation waits for what caller had then", "x stays for operation"),
        *("caller waits for what operation had then", "x stays for caller", "y stays for caller"),
    ]


def test_host_memory_has_no_order() -> None:
    assert stream_order(torch.ones(1)) is None
