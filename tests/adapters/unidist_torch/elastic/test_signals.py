"""Signals to the launcher of a job whose ranks have child processes, the workers of a DataLoader."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from unidist.checkpoint.format import directory

pytestmark = pytest.mark.parallel

ELASTIC = """
import time
import torch
import unidist.torch as ud
ud.init()
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = ud.distribute(model, optimizer)
state = ud.elastic.TorchState(model, optimizer, step=0)
data = torch.utils.data.TensorDataset(torch.ones(100000, 4))

@ud.elastic.run
def train(state):
    for (x,) in torch.utils.data.DataLoader(data, batch_size=2, num_workers=2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        state.step += 1
        time.sleep(0.02)
        print("step", state.step, flush=True)
        state.commit()

train(state)
"""

OWN_HANDLER = """
import signal, time
import torch
import unidist.torch as ud
ud.init()
asked = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: asked.append(1))
data = torch.utils.data.TensorDataset(torch.ones(100000, 4))
for step, (x,) in enumerate(torch.utils.data.DataLoader(data, batch_size=2, num_workers=2)):
    time.sleep(0.02)
    print("step", step, flush=True)
    if asked and step > 30:
        print("saved", ud.rank(), flush=True)
        break
"""


def interrupted(folder: Path, number: int, script: str, *options: str) -> tuple[int, str]:
    """Run a job on a terminal, interrupt it after five steps, and return its exit code and what it printed.

    SIGINT comes as Ctrl-C does, to the terminal's foreground group; others to the launcher's process.
    """
    (folder / "script.py").write_text(script)
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)

    def take_terminal() -> None:
        import fcntl

        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    command = [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", *options, sys.executable, "script.py"]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    text = ""
    sent = False
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # every process on the terminal has ended
            break
        text += data.decode()
        if not sent and "step 5" in text:
            sent = True
            if number == signal.SIGINT:
                os.write(ours, b"\x03")
            else:
                process.send_signal(number)
    os.close(ours)
    return process.wait(60), text


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_ranks_with_loader_workers_leave_in_order_and_make_a_checkpoint(tmp_path: Path, number: int) -> None:
    options = ("--min-np", "1", "--checkpoint-dir", "run", "--checkpoint-interval", "3600", "--grace-period", "60")
    code, text = interrupted(tmp_path, number, ELASTIC, *options)
    assert code == 128 + number, text
    assert "DataLoader worker" not in text, text
    assert "Traceback" not in text, text
    reached = max(int(step) for step in re.findall(r"step (\d+)", text))
    assert [step for step, _ in directory.steps(tmp_path / "run")][-1] == reached, text


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGINT])
def test_the_handler_of_a_script_can_use_its_loader_to_the_end(tmp_path: Path, number: int) -> None:
    code, text = interrupted(tmp_path, number, OWN_HANDLER, "--grace-period", "60")
    assert code == 128 + number, text
    assert "DataLoader worker" not in text, text
    assert {*re.findall(r"saved (\d)", text)} == {"0", "1"}, text
