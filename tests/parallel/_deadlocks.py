"""Programs whose ranks wait for each other, for `test_deadlocks`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import unidist.torch as ud
from unidist.errors import UnidistError
from unidist.runtime import context
from unidist.settings.environment import set_variables

LONG_SEC = 7.0
"""Much longer than a deadlock takes to be found."""


def ends(program: str, engine: str) -> tuple[str, str, float]:
    """Run one program; return the kind and text of its error ("" if there is none), and after how long it came."""
    with set_variables({"UNIDIST_ENGINE": engine}):
        ud.init()
        try:
            prepared = _PREPARE.get(program, _nothing)()
            ud.barrier()
            began = time.monotonic()
            try:
                _PROGRAMS[program](prepared)
            except UnidistError as error:
                return type(error).__name__, str(error), time.monotonic() - began
            return "", "", time.monotonic() - began
        finally:
            ud.shutdown()


def _nothing() -> Any:
    return None


def _other_names(prepared: Any) -> None:
    ud.allreduce(torch.ones(3), name="loss" if ud.rank() == 0 else "accuracy")


def _name_and_collective(prepared: Any) -> None:
    if ud.rank() == 0:
        ud.allreduce(torch.ones(3), name="loss")
    else:
        context.current().world.barrier().wait()


def _both_receive(prepared: Any) -> None:
    world = context.current().world
    buffer = world.allocate(64)
    if ud.rank() < 2:
        world.recv(buffer, source=1 - ud.rank()).wait()


def _one_ends(prepared: Any) -> None:
    if ud.rank() != 1:
        ud.allreduce(torch.ones(3), name="loss")


def _one_computes(prepared: Any) -> None:
    if ud.rank() == 0:
        time.sleep(LONG_SEC)
    assert float(ud.allreduce(torch.ones(()), op=ud.Sum, name="loss")) == ud.size()


def _large(prepared: Any) -> None:
    """Many large operations under way; none of them is a deadlock."""
    handles = [ud.allreduce_async(torch.ones(4 << 20), name=f"part {part}") for part in range(8)]
    if ud.rank() == 0:
        time.sleep(3)
    for handle in reversed(handles) if ud.rank() else handles:
        ud.synchronize(handle)


def _zero(strategy: str) -> Callable[[], Any]:
    def prepare() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
        model, optimizer = ud.distribute(model, torch.optim.Adam(model.parameters()), strategy=strategy)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    return prepare


def _optimizer_state(prepared: Any) -> None:
    if ud.rank() == 0:
        prepared[1].state_dict()
    ud.allreduce(torch.ones(3), name="loss")


def _model_state(prepared: Any) -> None:
    if ud.rank() == 0:
        prepared[0].state_dict()
    ud.allreduce(torch.ones(3), name="loss")


def _evaluation(prepared: Any) -> None:
    if ud.rank() == 0:
        with torch.no_grad():
            prepared[0](torch.ones(4, 8))
    ud.allreduce(torch.ones(3), name="loss")


def _save(prepared: Any) -> None:
    if ud.rank() == 0:
        ud.save("nowhere", model=prepared[0])
    ud.allreduce(torch.ones(3), name="loss")


_PREPARE: dict[str, Callable[[], Any]] = {
    "optimizer state": _zero("zero=1"),
    "model state": _zero("zero=3:shared=false"),
    "evaluation": _zero("zero=3:shared=false"),
    "save": _zero("zero=2"),
}
_PROGRAMS: dict[str, Callable[[Any], None]] = {
    "other names": _other_names,
    "name and collective": _name_and_collective,
    "both receive": _both_receive,
    "one ends": _one_ends,
    "one computes": _one_computes,
    "large": _large,
    "optimizer state": _optimizer_state,
    "model state": _model_state,
    "evaluation": _evaluation,
    "save": _save,
}
