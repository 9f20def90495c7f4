from __future__ import annotations

from unidist_bench import Figures, Results, Row, Series
from unidist_bench.collectives import Collective
from unidist_bench.command import table

SERIES = Series(
    Collective.ALLREDUCE,
    "float32",
    "sum",
    True,
    [
        Row(1000, 250, {"unidist": Figures(1e-6, 2e-6, 3e-6, 0), "gloo": Figures(4e-6, 5e-6, 6e-6, 1)}),
        Row(2000, 500, {"unidist": Figures(1e-6, 2e-6, 4e-6, 0), "gloo": Figures(4e-6, 8e-6, 9e-6, 2)}),
    ],
)
BARRIER = Series(Collective.BARRIER, "", "", False, [Row(0, 0, {"unidist": Figures(1e-6, 2e-6, 3e-6)})])
RESULTS = Results(
    "1.2", "today", "shm, ranks 0-3", "engine", ("a", "a", "b", "b"), {"gloo": "torch 9"}, [SERIES, BARRIER]
)


def test_the_table_has_times_bandwidths_ratios_and_wrong_elements() -> None:
    assert "4 ranks (2 on a, 2 on b), shm, ranks 0-3, engine memory" in table.head(RESULTS)[1]
    title = table.title(SERIES, ("gloo",))
    assert title[1] == "# allreduce, in place"
    words = table.line(SERIES.rows[0], SERIES, 4).split()
    assert words == ["1000", "250", "float32", "sum", "1.00", "2.00", "3.00", "0.500", "0.750", "1", "5.00", "2.50"]
    assert len(title[2]) == len(table.line(SERIES.rows[0], SERIES, 4))


def test_a_barrier_has_neither_type_nor_bandwidth_nor_result() -> None:
    assert table.line(BARRIER.rows[0], BARRIER, 4).split() == [
        "0",
        "0",
        "-",
        "-",
        "1.00",
        "2.00",
        "3.00",
        "-",
        "-",
        "-",
    ]
