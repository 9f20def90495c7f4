"""`run_elastic` on Spark: an executor is killed, the job goes on without it and grows again; failures are told."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from unidist.errors import ConfigurationError, RemoteError, UsageError
from unidist_spark import run_elastic

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

StartSpark = Callable[[str], Any]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    yield
    deadline = time.monotonic() + 60
    while left := [each for each in psutil.process_iter(["pid", "cmdline"]) if _is_ours(each.info["cmdline"])]:
        assert time.monotonic() < deadline, f"agents or ranks are left: {left}"
        time.sleep(0.1)


def test_a_killed_executors_ranks_go_the_others_go_on_and_others_come(start_spark: StartSpark, tmp_path: Path) -> None:
    start_spark("local-cluster[2,1,1024]")
    env = {"UNIDIST_HEARTBEAT_SEC": "5"}
    found = run_elastic(_train, [str(tmp_path)], num_proc=2, min_num_proc=1, env=env, elastic_timeout=120)
    assert (tmp_path / "killed").exists()
    assert [each["rank"] for each in found] == [0, 1]
    assert all(each["weights"] == found[0]["weights"] for each in found)
    # One rank or two, a step changes the weights in the same way: all ranks have the same data.
    assert found[0]["sizes"] == [2, 1, 2]
    assert abs(found[0]["weights"][0] - _weight_after(found[0]["steps"])) < 1e-12


def test_the_error_of_the_rank_that_failed_comes_out(start_spark: StartSpark) -> None:
    start_spark("local[2]")
    with pytest.raises(RemoteError, match=r"raised ZeroDivisionError: division by zero"):
        run_elastic(_divide, num_proc=2, reset_limit=0)


def test_arguments_that_cannot_be_followed_are_errors(start_spark: StartSpark) -> None:
    start_spark("local[2]")
    with pytest.raises(ConfigurationError, match="min_num_proc=3, num_proc=2, max_num_proc=2"):
        run_elastic(_divide, num_proc=2, min_num_proc=3)
    with pytest.raises(ConfigurationError, match=r"unidist.spark.run_elastic: stdout=1 cannot be followed"):
        run_elastic(_divide, stdout=1)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            run_elastic(_divide)
        except UsageError as exc:
            errors.append(exc)

    thread = threading.Thread(target=call, name="another")
    thread.start()
    thread.join(60)
    assert "was called in the thread 'another'" in str(errors[0])


def test_run_elastic_takes_horovods_arguments_in_its_order() -> None:
    parameters = inspect.signature(run_elastic).parameters
    assert [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY] == [
        "fn",
        "args",
        "kwargs",
        "num_proc",
        "min_num_proc",
        "max_num_proc",
        "start_timeout",
        "elastic_timeout",
        "reset_limit",
        "env",
        "stdout",
        "stderr",
        "verbose",
        "nics",
        "prefix_output_with_timestamp",
        "min_np",
        "max_np",
    ]


def _divide() -> float:
    from unidist.runtime import init

    init()
    return 1 / 0


def _train(folder: str) -> dict[str, Any]:
    """Train until there are two ranks again, after one of two has killed its executor."""
    import torch

    import unidist.torch as ud

    ud.init()
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    state = ud.elastic.TorchState(model, optimizer, step=0, sizes=[])

    @ud.elastic.run
    def loop(state: Any) -> None:
        while True:
            if not state.sizes or state.sizes[-1] != ud.size():
                state.sizes = [*state.sizes, ud.size()]
            if state.step == 5 and ud.rank() == 1 and not os.path.exists(f"{folder}/killed"):
                open(f"{folder}/killed", "x").close()
                _kill_the_executor()
            optimizer.zero_grad()
            model(torch.ones(1, 1, dtype=torch.float64)).pow(2).sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            if state.sizes == [2, 1, 2]:
                return
            time.sleep(0.1)

    loop(state)
    return {"rank": ud.rank(), "weights": model.weight[0].tolist(), "sizes": state.sizes, "steps": state.step}


def _weight_after(steps: int) -> float:
    weight = 1.0
    for _ in range(steps):
        weight -= 1e-4 * 2 * weight
    return weight


def _kill_the_executor() -> None:
    for parent in psutil.Process().parents():
        if "CoarseGrainedExecutorBackend" in " ".join(parent.cmdline()):
            parent.kill()
    time.sleep(600)


def _is_ours(command: list[str] | None) -> bool:
    return any(name in " ".join(command or ()) for name in ("elastic_calls.rank", "unidist_launch.agent.agent"))
