"""What an evaluator's script uses: the evaluations that it is to do."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unidist.errors import UsageError
from unidist_evaluator.link import AFTER_VARIABLE, READER_VARIABLE, SOCKET_VARIABLE
from unidist_evaluator.series import CheckpointSeries


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
    """The evaluator's end of the socket to the launcher; without a launcher the job has ended already."""

    def __init__(self) -> None:
        number = os.environ.get(SOCKET_VARIABLE)
        try:
            self._socket = None if number is None else socket.socket(fileno=os.dup(int(number)))
        except (ValueError, OSError) as exc:
            raise UsageError(
                f"{SOCKET_VARIABLE}={number} is not open in this process. Something between `unidist launch "
                "--evaluator` and this script replaced its descriptors; start the script directly"
            ) from exc

    def tell(self, step: int, values: dict[str, float]) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the launcher is gone
                self._socket.sendall(json.dumps({"step": step, "values": values}).encode() + b"\n")

    def when_the_job_ends(self, call: Any) -> None:
        if self._socket is None:
            call()
        else:
            threading.Thread(target=self._wait, args=(call,), name="unidist-evaluator-job", daemon=True).start()

    def _wait(self, call: Any) -> None:
        assert self._socket is not None
        with suppress(OSError):
            self._socket.recv(1)  # nothing is ever sent: it returns when the launcher has closed its side
        call()


def _number(name: str, value: Any) -> float:
    detach = getattr(value, "detach", None)
    try:
        return float(value if detach is None else detach())
    except (TypeError, ValueError) as exc:
        raise UsageError(f"Evaluation.report({name}={value!r}): give a number, or a tensor of one element") from exc
