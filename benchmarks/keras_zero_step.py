"""One training step in Keras with shared optimizer state, gradients and variables, beside plain data parallelism.

Run by `python -m benchmarks`, which starts it on two ranks. TensorFlow itself shares nothing of the kind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import unidist.tensorflow as ud
from benchmarks.keras_network import Wrap, make_loop_step, unchanged, unidist_meeting
from unidist_bench import side_by_side

LINES = ("data", "zero=1", "zero=2", "zero=3")


def sharing(line: str) -> Wrap:
    """Return what makes a model and an optimizer share as a strategy line says."""

    def wrap(model: Any, optimizer: Any) -> tuple[Any, Any]:
        made: tuple[Any, Any] = ud.distribute(model, optimizer, line)
        return made

    return wrap


def main(output: str, repetitions: int) -> None:
    """Measure, and let rank 0 write the medians (seconds) to `output`."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    ud.init()
    steps: dict[str, Callable[[], None]] = {
        "no communication": make_loop_step(unchanged),
        **{line: make_loop_step(sharing(line)) for line in LINES},
    }
    medians = side_by_side(steps, unidist_meeting(ud), repetitions=repetitions)
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump(medians, file)
    ud.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
