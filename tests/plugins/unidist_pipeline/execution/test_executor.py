"""The executor, the channels and what they agree on, without a framework: stages that add numbers, in threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.plugins.unidist_pipeline.sizes import all_schedules
from unidist.buffer import HOST, Buffer, DType
from unidist.communicator import Communicator, Work
from unidist.testing import ThreadWorld
from unidist.testing.recording import RecordingCommunicator
from unidist_pipeline.execution.channels import Channels, DifferentInputsError
from unidist_pipeline.execution.executor import Executor, Stage
from unidist_pipeline.execution.messages import Form, Message, StageFormError, TensorForm
from unidist_pipeline.execution.routes import Routes
from unidist_pipeline.schedules.model import Schedule
from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.simulator import simulate
from unidist_torch.framework import TorchFramework

torch = pytest.importorskip("torch", reason="its tensors are the messages")


def routes_over(communicator: Any) -> dict[str, Routes]:
    return {HOST: Routes(HOST, communicator, (), lambda whole, ranks: None)}


class Adding(Stage):
    """Passes on a row of numbers, one more than it has received; every gradient is one more than the one that came.

    Args:
        number: of the stage.
        num_stages: of the model.
        sizes: samples of each micro-batch.
        work: called with the kind of each action.
    """

    def __init__(
        self, number: int, num_stages: int, sizes: list[int], work: Callable[[str], None] = lambda kind: None
    ) -> None:
        self.number, self.num_stages, self.sizes, self.work = number, num_stages, sizes, work
        self.seen: dict[int, float] = {}
        self.gradients: dict[int, float] = {}
        self.weights = 0

    def forward(self, microbatch: int, received: Message | None) -> Message | None:
        self.work("F")
        value = float(microbatch) if received is None else float(received.tensors[0][0])
        self.seen[microbatch] = value
        return None if self.number + 1 == self.num_stages else self.row(value + 1, microbatch, needs_gradient=True)

    def backward(self, microbatch: int, gradients: Message | None) -> Message | None:
        self.work("B")
        self.weights += 1
        return self.back(microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Message | None) -> Message | None:
        self.work("I")
        return self.back(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        self.work("W")
        self.weights += 1

    def back(self, microbatch: int, gradients: Message | None) -> Message | None:
        value = 0.0 if gradients is None else float(gradients.tensors[0][0])
        self.gradients[microbatch] = value
        if self.number == 0:
            return None
        made = self.row(value + 1, microbatch)
        return Message(replace(made.form, structure=(True,)), made.tensors)

    def row(self, value: float, microbatch: int, *, needs_gradient: bool = False) -> Message:
        size = self.sizes[microbatch]
        return Message(Form((TensorForm((size,), DType.FLOAT32, needs_gradient),)), [torch.full((size,), value)])


def stages_of(schedule: Schedule, rank: int, sizes: list[int]) -> dict[int, Adding]:
    return {number: Adding(number, schedule.num_stages, sizes) for number in schedule.stages[rank]}


def test_every_schedule_brings_every_message_to_its_stage() -> None:
    schedules = list(all_schedules(ranks=(3,), microbatches=(1, 4, 5)))

    def main(communicator: Communicator) -> None:
        for schedule in schedules:
            channels = Channels(routes_over(communicator), TorchFramework())
            sizes = [3] * (schedule.num_microbatches - 1) + [2]
            for turn in range(2):  # before the forms are known, and after
                stages = stages_of(schedule, communicator.rank, sizes)
                channels.begin_run(f"{schedule.name} {schedule.num_microbatches} {turn}", sizes)
                Executor(channels, stages).run(schedule, communicator.rank)
                last = schedule.num_stages - 1
                for number, stage in stages.items():
                    for microbatch in range(schedule.num_microbatches):
                        assert stage.seen[microbatch] == microbatch + number
                        assert stage.gradients[microbatch] == last - number
                    assert stage.weights == schedule.num_microbatches
                Executor(channels, forward := stages_of(schedule, communicator.rank, sizes)).run(
                    schedule, communicator.rank, forward_only=True
                )
                assert all(len(stage.seen) == schedule.num_microbatches for stage in forward.values())

    with ThreadWorld(3) as world:
        world.run(main)


def test_a_form_is_sent_once() -> None:
    schedule = next(each for each in all_schedules(ranks=(2,), microbatches=(4,)) if each.name == "1f1b")

    def main(communicator: Communicator) -> list[int]:
        records: list[object] = []
        channels = Channels(routes_over(RecordingCommunicator(communicator, records)), TorchFramework())
        counts = []
        for _ in range(2):
            records.clear()
            channels.begin_run("", [3] * 4)
            Executor(channels, stages_of(schedule, communicator.rank, [3] * 4)).run(schedule, communicator.rank)
            counts.append(sum(record.operation == "send" for record in records))  # type: ignore[attr-defined]
        return counts

    with ThreadWorld(2) as world:
        assert world.run(main) == [[6, 4], [6, 4]], "size and form before the first of four messages"


def test_another_form_than_agreed_is_refused_and_named() -> None:
    def main(communicator: Communicator) -> None:
        channels = Channels(routes_over(communicator), TorchFramework())
        channels.begin_run("", ["a", "a"])
        if communicator.rank:
            return
        message = Message(Form((TensorForm((2,), DType.FLOAT32),)), [torch.zeros(2)])
        channels.send(("activation at", 1, 0), message, to=1)
        other = Message(Form((TensorForm((3,), DType.FLOAT32),)), [torch.zeros(3)])
        with pytest.raises(StageFormError, match=r"stage 0 .*micro-batch 1.*float32\[2\].*float32\[3\]"):
            channels.send(("activation at", 1, 1), other, to=1)

    with ThreadWorld(2) as world:
        world.run(main)


def test_ranks_that_begin_something_else_are_told() -> None:
    def main(communicator: Communicator) -> None:
        channels = Channels(routes_over(communicator), TorchFramework())
        with pytest.raises(DifferentInputsError, match=r"rank 0: step 0; rank 1: step 1"):
            channels.begin_run(f"step {communicator.rank}", [])
        channels.begin_run("the same", [])

    with ThreadWorld(2) as world:
        world.run(main)


class _Later(Work):
    """A receive that is complete so long after its message was sent."""

    def __init__(self, work: Work, stamp: Buffer, delay: float) -> None:
        self._work, self._stamp, self._delay = work, stamp, delay

    def wait(self, timeout: timedelta | None = None) -> None:
        self._work.wait(timeout)
        sent = self._stamp.bytes()[:8].cast("d")[0]
        time.sleep(max(0.0, sent + self._delay - time.monotonic()))

    def done(self) -> bool:
        return self._work.done()


class _Slow:
    """A communicator whose messages are under way for a while; they carry the time at which they were sent."""

    def __init__(self, inner: Communicator, delay: float) -> None:
        self._inner, self._delay = inner, delay

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def send(self, buffer: Buffer, *, to: int) -> Work:
        stamped = Buffer.allocate(8 + buffer.nbytes, DType.UINT8)
        stamped.bytes()[:8].cast("d")[0] = time.monotonic()
        stamped.bytes()[8:] = buffer.bytes()
        return self._inner.send(stamped, to=to)

    def recv(self, buffer: Buffer, *, source: int) -> Work:
        stamped = Buffer.allocate(8 + buffer.nbytes, DType.UINT8)
        work = _Later(self._inner.recv(stamped, source=source), stamped, self._delay)

        class Copying(Work):
            def wait(self, timeout: timedelta | None = None) -> None:
                work.wait(timeout)
                buffer.bytes()[:] = stamped.bytes()[8:]

            def done(self) -> bool:
                return work.done()

        return Copying()


@pytest.mark.soak
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_messages_and_computing_overlap_as_the_simulator_says(name: str) -> None:
    delay, unit = 0.05, 0.04
    durations = {"F": unit, "B": 2 * unit, "I": unit, "W": unit}
    schedule = next(each for each in all_schedules(ranks=(4,), microbatches=(8,)) if each.name == name)
    costs = Costs(forward=unit, backward=2 * unit, message=delay)

    def main(communicator: Communicator) -> float:
        channels = Channels(routes_over(_Slow(communicator, delay)), TorchFramework())
        for _ in range(2):  # the first one agrees on forms, and waits for them
            work = lambda kind: time.sleep(durations[kind])  # noqa: E731 - one line says it
            number = schedule.stages[communicator.rank][0]
            channels.begin_run("", [3] * 8)
            start = time.monotonic()
            stage = Adding(number, 4, [3] * 8, work)
            Executor(channels, {number: stage}).run(schedule, communicator.rank)
            elapsed = time.monotonic() - start
        return elapsed

    with ThreadWorld(4) as world:
        found = max(world.run(main))
    expected = simulate(schedule, costs).makespan
    assert found == pytest.approx(expected, rel=0.15), f"{name}: {found:.2f} s, simulated {expected:.2f} s"
