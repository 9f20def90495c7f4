"""Measured costs of the steps of a Keras model's program: time, or memory of the values that they make."""

from __future__ import annotations

import time
from typing import Any, Literal

import tensorflow as tf

from unidist_pipeline._keras.tracing.program import Program

_REPEATS = 3


def measured_costs(program: Program, example: Any, kind: Literal["time", "memory"]) -> list[float]:
    """Return the costs of the steps: seconds of a forward pass, or bytes of the values that it makes.

    Args:
        program: of the model in inference, so that running it changes nothing.
        example: inputs of the model.
        kind: what to measure.
    """
    values = dict(zip(program.inputs, program.standardize(example), strict=True))
    costs = []
    for step in program.steps:
        best = float("inf")
        results: list[Any] = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            results = step.run(values, training=False)
            best = min(best, time.perf_counter() - start)
        values.update(zip(step.results, results, strict=True))
        size = sum(each.dtype.size * int(tf.size(each)) for each in map(tf.convert_to_tensor, results))
        costs.append(best if kind == "time" else float(size))
    return costs
