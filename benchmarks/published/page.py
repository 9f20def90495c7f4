"""The page and the plot of docs/published.md, written from `figures.json`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from benchmarks.published.predictions import Point, figures, points

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 900, 250, 60, 26, 44
_MOST = 1.6
"""The plot reaches from 1/1.6 to 1.6 of the published figure."""
_LABELS = {
    "flops": ("operations in a second in large products", 1e12, "TFLOP/s"),
    "attention_flops": ("likewise in attention", 1e12, "TFLOP/s"),
    "product_overhead": ("of each product in addition", 1e-6, "us"),
    "memory_bandwidth": ("memory", 1e9, "GB/s"),
    "memory_bytes": ("memory of a rank", 1e9, "GB"),
    "ranks_per_host": ("ranks of a host", 1, ""),
    "efficiency_between": ("of the bandwidth between hosts is reached", 1, ""),
    "overlap": ("of an exchange can go on behind arithmetic", 1, ""),
}

_BEGIN = """# Published figures beside predictions

Every figure here is from a paper or a project's own page, and beside it is what unidist predicts
from the same inputs. Misses are included. `python -m benchmarks.published` writes this page and its
plot from `benchmarks/published/figures.json`, and tests go through the same rows.

![Predictions by published figures](published.svg)

A dot is one row of a table. At 1 the prediction is the published figure. Point at a dot to see what
it is.

Of each kind of machine there is one set of constants, for all papers that used it: see
[Constants](#constants). No constant belongs to a row.

Read close agreement with care. Sources were chosen, and choices were made between several ways to
model rings and gathers, with these figures in view: the latencies and the 0.34 of Selene, the
time of each product, the rate of attention, the peak of H100s, the 0.4 that gathers ahead of time
gain. The 0.8 between hosts is fitted to VGG-16. The tolerances of the tests guard against changes;
they are not a measure of accuracy.
"""


_LEFT_OUT = """## Left out

- What overlap gains in DDP (Li et al. 2020, VLDB: 38.0 and 35.2 % for ResNet-50 and BERT with NCCL,
  26.8 and 21.5 % with Gloo): the batches of a GPU, on which it depends, are not known here.
- Table 6 of Qi et al. 2024, and 14.6B and 28.3B in its Table 4: times of their stages are not known
  here.
- Measured sizes in ZeRO's Table 2: they depend on memory that is not of parameters.
- AmoebaNet in GPipe: the split into stages is not published.
- float8 products in torchtitan's rows of H100.
"""


def markdown() -> str:
    """Return the page."""
    parts = [_BEGIN, _summary()]
    for table in figures()["tables"]:
        parts.append(_section(table, points(table)))
    parts += [_LEFT_OUT, _constants()]
    return "\n".join(parts)


def _summary() -> str:
    lines = ["## Summary", "", "| comparison | rows | mean error | largest error |", "|---|---|---|---|"]
    for table in figures()["tables"]:
        errors = [abs(point.error) for point in points(table)]
        mean = sum(errors) / len(errors)
        lines.append(
            f"| [{table['title']}](#{_anchor(table['title'])}) | {len(errors)} | {mean:.1%} | {max(errors):.1%} |"
        )
    return "\n".join([*lines, ""])


def _section(table: Mapping[str, Any], found: Sequence[Point]) -> str:
    lines = [f"## {table['title']}", "", *_wrapped(f"{table['source']}. {_sentence(table['unit'])}."), ""]
    for paragraph in table.get("note", []):
        lines += [*_wrapped(paragraph), ""]
    lines += ["| | published | predicted | difference |", "|---|---|---|---|"]
    for point in found:
        numbers = f"{point.published:,.{point.digits}f} | {point.predicted:,.{point.digits}f}"
        lines.append(f"| {point.name} | {numbers} | {point.error:+.1%} |")
    return "\n".join([*lines, ""])


def _constants() -> str:
    lines = ["## Constants", ""]
    for machine in figures()["machines"].values():
        lines += [f"### {machine['title']}", ""]
        for name, constant in machine["constants"].items():
            if constant["source"].startswith("not used"):
                continue
            lines += _wrapped(f"- {_value(name, constant['value'])}: {constant['source']}.", indent="  ")
        lines.append("")
    return "\n".join(lines)


def _value(name: str, value: Any) -> str:
    if name in ("inside", "between"):
        where = "inside of a host" if name == "inside" else "between hosts, of a host"
        return f"{value[0] * 1e6:g} us and {value[1] / 1e9:g} GB/s {where}"
    label, unit, word = _LABELS[name]
    return " ".join(filter(None, [f"{value / unit:g}", word, label]))


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _anchor(title: str) -> str:
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def svg() -> str:
    """Return the plot: for each table a line with a dot for each row, by prediction over published figure."""
    tables = figures()["tables"]
    height = _TOP + _ROW * len(tables) + 40
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}">',
        '<g font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        *_axis(height),
    ]
    for index, table in enumerate(tables):
        y = _TOP + _ROW * index + _ROW / 2
        lines.append(
            f'<text x="{_LEFT - 12}" y="{y + 4:g}" text-anchor="end" fill="#222">{escape(table["title"])}</text>'
        )
        lines.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:g}" y2="{y:g}" stroke="#eee"/>')
        for point in points(table):
            said = f"{point.name}: published {point.published:g}, predicted {point.predicted:.{point.digits}f}"
            lines.append(
                f'<circle cx="{_x(1 + point.error):.1f}" cy="{y:g}" r="4.5" fill="#3f72af" fill-opacity="0.55">'
                f"<title>{escape(said)}</title></circle>"
            )
    label = "prediction / published figure"
    lines.append(f'<text x="{_x(1):.1f}" y="{height - 8}" text-anchor="middle" fill="#222">{label}</text>')
    return "\n".join([*lines, "</g>", "</svg>", ""])


def _axis(height: int) -> Iterator[str]:
    for value in (0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5):
        x, color = _x(value), "#888" if value == 1.0 else "#ddd"
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 10}" y2="{height - 34}" stroke="{color}"/>'
        yield f'<text x="{x:.1f}" y="{_TOP - 16}" text-anchor="middle" fill="#555">{value:g}</text>'


def _x(ratio: float) -> float:
    middle, half = (_LEFT + _WIDTH - _RIGHT) / 2, (_WIDTH - _RIGHT - _LEFT) / 2
    return middle + half * max(-1.0, min(1.0, math.log(ratio) / math.log(_MOST)))
