"""What `--verify replay=N` compares, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unidist.errors import ReplayError
from unidist.negotiation import Request
from unidist.settings.environment import Verify
from unidist.topology import Topology
from unidist.verification import replay
from unidist.verification.replay import Replay


class Operations:
    """Those of two ranks, of which the other one has found something, or not."""

    def __init__(self, other: bool) -> None:
        self.other = other

    def submit(self, request: Request) -> Any:
        data = request.target.bytes()
        data[0] = max(data[0], self.other)
        return SimpleNamespace(wait=lambda: None)


def made(every: int, rank: int = 0, operations: Operations | None = None) -> Replay:
    runtime: Any = SimpleNamespace(
        settings=SimpleNamespace(verify=Verify(replay=every)),
        topology=Topology(rank, 2, rank, 2),
        operations=lambda: operations,
    )
    return Replay(runtime)


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6]), (3, [1, 3, 6])])
def test_the_first_step_and_every_nth_are_compared(every: int, due: list[int]) -> None:
    check = made(every)
    assert [step for step in range(1, 7) if check.is_due(step)] == due


def compared(monkeypatch: pytest.MonkeyPatch, found: list[dict[str, bytes]], other: tuple[str, ...] = ()) -> None:
    def everyone(_: Any, own: Any, *, name: str) -> list[Any]:
        assert name == "verify replay"
        return [own, own._replace(names=other, host="b")]

    monkeypatch.setattr(replay, "allgather_object", everyone)
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    made(1, operations=Operations(bool(other))).compare(7, iter(found).__next__)


def test_equal_digests_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    compared(monkeypatch, [{"the loss": b"1"}, {"the loss": b"1"}])


def test_a_rank_with_other_bits_is_named_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    again = [{"the loss": b"1", "w": b"2", "v": b"3"}, {"the loss": b"1", "w": b"4"}]
    with pytest.raises(ReplayError, match=r"^step 7: .*bits \(rank 0 on a: w and 1 more; rank 1 on b: x\)\. If"):
        compared(monkeypatch, again, ("x",))
    with pytest.raises(ReplayError, match=r"bits \(rank 1 on b: x\)"):
        compared(monkeypatch, [{}, {}], ("x",))


def test_a_loop_of_the_scripts_own_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    used, other = made(5), made(5, rank=1)
    used.is_used = True
    for check in (used, other, made(0)):
        check.warn_if_unused("fit")
    assert caplog.text == ""
    made(5).warn_if_unused("fit")
    assert (
        "--verify replay=5: fit does not run the passes, so no batch is computed twice; TrainStep does" in caplog.text
    )
