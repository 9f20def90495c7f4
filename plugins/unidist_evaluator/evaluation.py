"""The evaluations that an evaluator's script has to do, for that script."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unidist.control import job_values
from unidist.errors import PeerLostError, StalledError, UsageError
from unidist_evaluator.link import AFTER_VARIABLE, READER_VARIABLE, end_key, report_key
from unidist_evaluator.series import CheckpointSeries

_LOOK_SEC = 0.2


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint to evaluate.

    Args:
        step: number of the checkpoint.
        path: give it to `load`.
    """

    step: int
    path: Path
    _link: _Link = field(repr=False)

    def report(self, **values: Any) -> None:
        """Tell the launcher, which hands it to the status page and the trackers.

        Args:
            **values: numbers, or tensors of one element, by name. What is not finite is left out of records.

        Raises:
            UsageError: there is no value, or one is no number.
        """
        if not values:
            raise UsageError("Evaluation.report() without values: report(accuracy=0.9)")
        self._link.tell(self.step, {name: _number(name, value) for name, value in values.items()})


def evaluations(folder: str | os.PathLike[str]) -> Iterator[Evaluation]:
    """Yield each finished checkpoint of a series once, in order, and end with the job.

        for evaluation in evaluations("run"):  # ud.save("run", model, step=...) in the job
            ud.load(evaluation.path, model)
            evaluation.report(accuracy=accuracy_of(model))

    In a process that `unidist launch --evaluator` has started it goes on until the job has ended and its last
    checkpoint was evaluated. An evaluator that is started again begins behind the last one that it has reported.
    Elsewhere it yields what is there.

    Args:
        folder: of the series; it need not exist yet.

    Raises:
        UsageError: the folder is a checkpoint itself.
    """
    link = _Link()
    after, reader = int(os.environ.get(AFTER_VARIABLE, "-1")), os.environ.get(READER_VARIABLE, "")
    with CheckpointSeries(folder, after=after, reader=reader) as series:
        link.when_the_job_ends(series.end)
        for found in series:
            yield Evaluation(found.step, found.path, link)


class _Link:
    """The evaluator's end of its connection to the launcher; without a launcher the job has ended already."""

    def __init__(self) -> None:
        self._name = os.environ.get(READER_VARIABLE, "")
        self._values = job_values() if self._name else None
        self._count = 0
        while self._values is not None and self._values.present([report_key(self._name, self._count)]):
            self._count += 1  # those of an earlier process

    def tell(self, step: int, values: dict[str, float]) -> None:
        if self._values is not None:
            report = json.dumps({"step": step, "values": values}).encode()
            with suppress(PeerLostError, StalledError):  # the launcher is gone
                self._values.set(report_key(self._name, self._count), report)
                self._count += 1

    def when_the_job_ends(self, call: Callable[[], None]) -> None:
        if self._values is None:
            call()
        else:
            threading.Thread(target=self._wait, args=(call,), name="unidist-evaluator-job", daemon=True).start()

    def _wait(self, call: Callable[[], None]) -> None:
        assert self._values is not None
        with suppress(PeerLostError, StalledError):
            while not self._values.present([end_key(self._name)]):
                time.sleep(_LOOK_SEC)
        call()


def _number(name: str, value: Any) -> float:
    detach = getattr(value, "detach", None)
    try:
        return float(value if detach is None else detach())
    except (TypeError, ValueError) as exc:
        raise UsageError(f"Evaluation.report({name}={value!r}): give a number, or a tensor of one element") from exc
