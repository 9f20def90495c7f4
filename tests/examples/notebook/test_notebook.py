"""The example notebook, and others, in a real Jupyter kernel."""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

WHY = "in the extra `notebook`"
pytest.importorskip("ipykernel", reason=WHY)
nbclient = pytest.importorskip("nbclient", reason=WHY)
nbformat = pytest.importorskip("nbformat", reason=WHY)
manager = pytest.importorskip("jupyter_client.manager", reason=WHY)

ROOT = Path(__file__).parents[3]
SECONDS = 120

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::ResourceWarning")


def stream(cell: Any, name: str = "stdout") -> str:
    return "".join(each["text"] for each in cell["outputs"] if each.get("name") == name)


def test_the_example_trains_and_shows_what_each_rank_prints() -> None:
    notebook = nbformat.read(ROOT / "examples/notebook/digits.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without outputs"
    nbclient.NotebookClient(notebook, timeout=SECONDS, kernel_name="python3").execute()
    *_, run, _, pool = notebook.cells
    (right,) = re.findall(r"right: (\S+) %", stream(run))
    assert float(right) > 90
    losses = re.findall(r"^\[([01])\] epoch (\d+): loss (\S+)$", stream(run), re.MULTILINE)
    assert sorted(losses[i][0] for i in range(6)) == ["0"] * 3 + ["1"] * 3, stream(run)
    assert len({loss for _, epoch, loss in losses if epoch == "60"}) == 1
    assert stream(pool).count("[1] epoch 20:") == 2


class Kernel:
    """A kernel, and what its cells print."""

    def __init__(self) -> None:
        self._manager = manager.KernelManager(kernel_name="python3")
        self._manager.start_kernel()
        self.client = self._manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)
        self.output = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        """Read what the running cell prints until a pattern matches."""
        deadline = time.monotonic() + SECONDS
        while (found := re.search(pattern, self.output)) is None:
            assert time.monotonic() < deadline, self.output
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            self.output += str(message["content"].get("text", ""))
        return found

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        self._manager.shutdown_kernel(now=True)
        self.client.stop_channels()


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    made.kill()


SLEEP = """
import os, sys, time, unidist
def sleep():
    print("pid", os.getpid())
    sys.stderr.write("\\r 10%")
    sys.stderr.write("\\r 20%")
    sys.stderr.write("\\r 30%")
    sys.stderr.flush()
    time.sleep(300)
unidist.run(sleep, num_proc=2)
"""


def pids(kernel: Kernel) -> list[int]:
    return [int(kernel.read_until(rf"\[{rank}\] pid (\d+)\n")[1]) for rank in (0, 1)]


def gone(numbers: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(number) for number in numbers):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_an_interrupt_ends_the_ranks_and_the_kernel_goes_on(kernel: Kernel) -> None:
    sent = kernel.client.execute(SLEEP)
    running = pids(kernel)
    kernel.read_until(r"\[0\]  20%\r")
    kernel.interrupt()
    reply = kernel.client.get_shell_msg(timeout=SECONDS)
    while reply["parent_header"]["msg_id"] != sent:  # the client has asked before whether the kernel is ready
        reply = kernel.client.get_shell_msg(timeout=SECONDS)
    assert (reply["content"]["status"], reply["content"]["ename"]) == ("error", "KeyboardInterrupt")
    assert gone(running)
    kernel.client.execute("print('again', unidist.run(lambda: 7, num_proc=2))")
    kernel.read_until(r"again \[7, 7\]")


def test_a_kernel_that_is_killed_leaves_no_rank(kernel: Kernel) -> None:
    kernel.client.execute(SLEEP)
    running = pids(kernel)
    kernel.kill()
    assert gone(running)
