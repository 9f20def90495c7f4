"""Separate states of the global random generators."""

from __future__ import annotations

import random

import numpy as np
import torch

from unidist_torch.loading.random_states import RandomStates


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_draws_go_on_inside_and_leave_no_trace_outside() -> None:
    outside = draw()
    first, second = RandomStates(5), RandomStates(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with first:
        one = draw()
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    with first:
        two = draw()
    with second:
        again = [draw(), draw()]
    assert again == [one, two]
    assert len({outside, one, two, draw()}) == 4


def test_parts_have_seeds_of_their_own() -> None:
    drawn = []
    for part in range(3):
        states = RandomStates(7)
        with states:
            draw()
        states.seed_part(part)
        with states:
            drawn.append(draw())
    assert len(set(drawn)) == 3
