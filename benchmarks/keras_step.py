"""One training step in Keras: without communication, with unidist's optimizer and its tape, with Horovod's tape.

Run by `python -m benchmarks`, which starts it by `horovodrun` on two ranks. `fit` is measured without Horovod, whose
optimizer exchanges nothing on Keras 3.
"""

from __future__ import annotations

import json
import statistics
import sys

import horovod.tensorflow as hvd
import tensorflow as tf

import unidist.tensorflow as ud
from benchmarks.keras_network import STEPS_PER_FIT, make_fit_steps, make_loop_step, unchanged, unidist_meeting
from unidist_bench import side_by_side

_ROUNDS = 4


def main(output: str, repetitions: int) -> None:
    """Measure, and let rank 0 write the medians (seconds) to `output`."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    ud.init()
    meeting = unidist_meeting(ud)
    ours = {
        "loop, no communication": make_loop_step(unchanged),
        "loop, unidist": make_loop_step(ud.distribute),
        "tape, unidist": make_loop_step(unchanged, ud.DistributedGradientTape),
    }
    theirs = {"loop, Horovod": make_loop_step(unchanged, hvd.DistributedGradientTape)}
    fits = {"fit, no communication": make_fit_steps(unchanged), "fit, unidist": make_fit_steps(ud.distribute)}
    rounds = []
    for _ in range(_ROUNDS):
        turns = -(-repetitions // _ROUNDS)
        found = side_by_side(ours, meeting, repetitions=turns)
        for name, value in side_by_side(fits, meeting, repetitions=turns).items():
            found[name] = value / STEPS_PER_FIT
        hvd.init()  # not before: its thread, which wakes a thousand times a second, is no part of the others
        rounds.append(found | side_by_side(theirs, meeting, repetitions=turns))
        hvd.shutdown()
    medians = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump(medians, file)
    ud.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
