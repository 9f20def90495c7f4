"""The chart in the terminal, as text."""

from __future__ import annotations

import io

from rich.console import Console

from unidist_pipeline.schedules.classic import interleaved, one_forward_one_backward
from unidist_pipeline.schedules.model import PipelineSize
from unidist_pipeline.schedules.zero_bubble import zb_h1
from unidist_pipeline.simulation.costs import Costs
from unidist_pipeline.simulation.drawing import MAX_ROWS, Chart, headline
from unidist_pipeline.simulation.simulator import Simulation, simulate


def drawn(simulation: Simulation, *, width: int, colours: bool = False) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=colours, color_system="standard" if colours else None
    )
    console.print(Chart(simulation))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_each_action_stands_where_it_happens() -> None:
    simulation = simulate(one_forward_one_backward(PipelineSize(2, 2)))
    lines = drawn(simulation, width=len("rank 0 ") + 3 * 9)
    assert lines[0] == "rank 0 F0 F1 ······B0    ···B1    "
    assert lines[1] == "rank 1 ···F0 B0    F1 B1    ······"
    assert lines[2].strip() == "F  forward   B  backward"


def test_where_numbers_have_no_room_letters_stay() -> None:
    simulation = simulate(zb_h1(PipelineSize(2, 2)))
    assert drawn(simulation, width=7 + 7)[:2] == ["rank 0 FF·IWIW", "rank 1 ·FIFIWW"]


def test_stages_of_one_rank_are_told_apart_and_lines_are_never_longer_than_the_terminal() -> None:
    simulation = simulate(interleaved(PipelineSize(2, 4, 2)))
    lines = drawn(simulation, width=150)
    assert "F0'" in lines[0]
    for width in (20, 33, 80):
        assert all(len(line) <= width for line in drawn(simulation, width=width)[:2])


def test_figures_stand_below() -> None:
    lines = drawn(simulate(one_forward_one_backward(PipelineSize(2, 4)), Costs(1, 3)), width=80)
    assert [line.split() for line in lines[-2:]] == [["0", "0", "16", "4", "4", "2"], ["1", "1", "16", "4", "0", "1"]]


def test_of_many_ranks_the_first_and_the_last_are_drawn() -> None:
    lines = drawn(simulate(one_forward_one_backward(PipelineSize(100, 2))), width=60)
    assert sum(line.startswith("rank ") for line in lines) == MAX_ROWS
    assert any(line.startswith("... 60 more ranks") for line in lines)
    assert any(line.startswith("rank 99 ") for line in lines)


def test_a_terminal_gets_colours() -> None:
    assert any("\x1b[" in line for line in drawn(simulate(zb_h1(PipelineSize(2, 2))), width=60, colours=True))


def test_the_headline_has_the_main_figures() -> None:
    assert headline(simulate(one_forward_one_backward(PipelineSize(4, 8)))) == (
        "1f1b: 4 stages on 4 ranks, 8 micro-batches; makespan 33, bubble 27.3%, peak activations 4"
    )


def test_what_rounding_leaves_is_not_shown() -> None:
    lines = drawn(simulate(one_forward_one_backward(PipelineSize(3, 7)), Costs(0.1, 0.3, 0.1)), width=80)
    assert [line.split()[-2] for line in lines[-3:]] == ["0.8", "0.4", "0"]


def test_a_step_that_takes_no_time_can_be_drawn() -> None:
    lines = drawn(simulate(one_forward_one_backward(PipelineSize(1, 1)), Costs(0, 0)), width=20)
    assert lines[0].startswith("rank 0 ·")
