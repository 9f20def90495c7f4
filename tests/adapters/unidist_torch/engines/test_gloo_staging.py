"""Copies of device tensors to host memory for gloo, on a simulated device: what is read goes there, results back."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine gloo is PyTorch's")

from simulated_device import Machine  # noqa: E402 - after the check for torch

import unidist.torch as ud  # noqa: E402
from unidist.buffer import HOST, Buffer  # noqa: E402
from unidist.communicator import COMPLETED, Work  # noqa: E402
from unidist_torch.engines.gloo import GlooCommunicator  # noqa: E402
from unidist_torch.engines.process_group import ProcessGroupCommunicator  # noqa: E402
from unidist_torch.memory import tensor_of  # noqa: E402

CASES: list[tuple[str, bool, dict[str, Any], int, int]] = [
    ("allreduce", False, {}, 1, 1),
    ("allreduce", True, {}, 1, 1),
    ("allgather", False, {}, 1, 1),
    ("reducescatter", False, {}, 1, 1),
    ("alltoall", False, {"send_counts": [4], "receive_counts": [4]}, 1, 1),
    ("broadcast", True, {"root": 0}, 1, 1),
    ("send", True, {"to": 1}, 1, 0),
    ("recv", True, {"source": 1}, 0, 1),
]


@pytest.mark.parametrize(("name", "is_in_place", "arguments", "num_to_host", "num_back"), CASES)
def test_values_are_copied_once(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_in_place: bool,
    arguments: dict[str, Any],
    num_to_host: int,
    num_back: int,
) -> None:
    def operation(self: Any, *buffers: Buffer, **others: Any) -> Work:
        assert all(buffer.memory == HOST for buffer in buffers)
        if name != "recv":
            assert tensor_of(buffers[0]).tolist() == [1.0] * 4
        tensor_of(buffers[-1]).fill_(5.0)
        return COMPLETED

    monkeypatch.setattr(ProcessGroupCommunicator, name, operation)
    communicator = GlooCommunicator.__new__(GlooCommunicator)
    with Machine() as machine, machine.computing():
        source = torch.full((4,), 1.0, device="cuda")
        target = source if is_in_place else torch.zeros(4, device="cuda")
        given = [source] if name in ("broadcast", "send", "recv") else [source, target]
        getattr(communicator, name)(*map(ud.buffer, given), **arguments).wait()
        copies = [entry.name for entry in machine.log if entry.kind == "copy"]
        assert (copies.count("to host"), copies.count("to device")) == (num_to_host, num_back)
        assert target.tolist() == [5.0 if num_back else 1.0] * 4
