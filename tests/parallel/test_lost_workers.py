"""Jobs that go on without a rank: those whose strategy lets the others make their steps alone."""

from __future__ import annotations

import time

import pytest
from unidist_command import Command

pytest.importorskip("torch")
pytestmark = pytest.mark.parallel

_TRAIN = """
    import torch
    import unidist.torch as ud
    ud.init()
    torch.manual_seed(1)
    model, optimizer = ud.distribute(*(lambda model: (model, torch.optim.SGD(model.parameters(), lr=0.1)))(
        torch.nn.Linear(4, 1)
    ))
    for step in range(30):
        if step == 5:
            {event}
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        time.sleep(0.01)
    print("steps", step + 1, bool(torch.isfinite(model.weight).all()), flush=True)
    ud.shutdown()
"""


def _train(command: Command, *options: str, event: str) -> tuple[int, str, str, float]:
    begun = time.monotonic()
    done = command.run("launch", "-np", "3", *options, command.script(_TRAIN.format(event=event)))
    return done.returncode, done.stdout, done.stderr, time.monotonic() - begun


@pytest.mark.parametrize("mode", ["async", "async:staleness=2"])
def test_workers_go_on_without_one_that_was_killed(command: Command, mode: str) -> None:
    event = "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)"
    code, out, err, seconds = _train(command, "--strategy", f"parameter_server={mode}", event=event)
    assert code == 0, err
    assert "rank 2 is lost (killed by signal 9 (SIGKILL)); the others go on without it" in err
    assert "[0-1] steps 30 True" in out or ("[0] steps 30 True" in out and "[1] steps 30 True" in out), out
    assert seconds < 90


def test_the_job_ends_with_its_chief(command: Command) -> None:
    event = "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)"
    code, _, err, _ = _train(command, "--strategy", "parameter_server=async", event=event)
    assert code == 128 + 9, err
    assert "rank 0 failed first" in err


def test_a_script_that_fails_ends_the_job(command: Command) -> None:
    event = "if rank == 2: raise ValueError('mine')"
    code, _, err, _ = _train(command, "--strategy", "parameter_server=async", event=event)
    assert code == 1, err
    assert "rank 2 failed first" in err


def test_synchronous_workers_do_not_go_on(command: Command) -> None:
    event = "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)"
    code, _, err, _ = _train(command, "--strategy", "parameter_server=sync", event=event)
    assert code == 128 + 9, err
    assert "rank 2 failed first" in err
