"""`unidist bench`: latency and bandwidth of collectives, on the ranks of a job."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from unidist.buffer import DType
from unidist.communicator import ReduceOp
from unidist.errors import ConfigurationError, unknown_choice
from unidist.launcher import JobObserver
from unidist_bench.sizes import Sizes, parse_bytes
from unidist_launch.commands import job_command, run_program
from unidist_launch.display import GroupedOption
from unidist_launch.options.numbers import Real, Whole

if TYPE_CHECKING:
    from unidist_bench.measurement.order import MeasurementOrder
    from unidist_bench.results import Results

_PROGRAM = "unidist_bench.measurement.program"
_WHAT, _RESULTS = "What is measured", "What comes of it"
_COUNT = Whole(min=1)
_OPS = {"sum": ReduceOp.SUM, "prod": ReduceOp.PRODUCT, "product": ReduceOp.PRODUCT, "min": ReduceOp.MIN}
_OPS |= {"max": ReduceOp.MAX}
_PACKAGES = {"gloo": ("torch", "PyTorch"), "mpi": ("mpi4py", "mpi4py")}


class _BytesType(click.ParamType):  # type: ignore[type-arg]  # generic in some versions of click only
    """A size in bytes: `8`, `64K`, `1GiB`, `100MB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = value if isinstance(value, int) else parse_bytes(str(value))
        if found is None:
            self.fail(f"{value!r} is no size in bytes: write 8, 64K, 1GiB or 100MB", param, ctx)
        return found


def _option(group: str, *names: str, **attributes: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    return click.option(*names, cls=GroupedOption, group=group, **attributes)


@job_command
@_option(_WHAT, "-b", "--min-bytes", type=_BytesType(), default="8", metavar="SIZE", help="First size (default: 8).")
@_option(_WHAT, "-e", "--max-bytes", type=_BytesType(), default="64M", metavar="SIZE", help="Last (default: 64M).")
@_option(_WHAT, "-f", "--factor", type=Real(), metavar="N", help="From one size to the next (default: 2).")
@_option(_WHAT, "--step-bytes", type=_BytesType(), metavar="SIZE", help="The same as a sum, instead of --factor.")
@_option(_WHAT, "-d", "--dtype", default="float32", metavar="NAME", help="Element type (default: float32).")
@_option(_WHAT, "-o", "--op", default="sum", metavar="NAME", help="sum, prod, min or max (default: sum).")
@_option(_WHAT, "--root", type=Whole(min=0), default=0, metavar="RANK", help="Of a broadcast (default: 0).")
@_option(
    _WHAT,
    "--in-place/--out-of-place",
    default=None,
    help="Source and target are the same memory (default: of allreduce and broadcast).",
)
@_option(
    _WHAT,
    "--memory",
    type=click.Choice(["engine", "ordinary"]),
    help="What our buffers are in (default: engine, if the engine has such memory).",
)
@_option(_WHAT, "--named", is_flag=True, help="Named operations take turns with the plain ones.")
@_option(_WHAT, "--beside", multiple=True, metavar="NAMES", help="gloo, mpi or both take turns, too: gloo,mpi.")
@_option(_WHAT, "--warmup", type=Whole(min=0), default=5, metavar="N", help="Not counted (default: 5).")
@_option(_WHAT, "--iterations", type=_COUNT, metavar="N", help="Counted repetitions (default: 100 to 10, by size).")
@_option(
    _WHAT, "--inner", type=_COUNT, metavar="N", help="Calls in each, which count as their mean (default: by size)."
)
@_option(_RESULTS, "--check/--no-check", default=True, help="Compare a result of each size (default: yes).")
@_option(
    _RESULTS,
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the results as JSON.",
)
@_option(
    _RESULTS,
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw them: FILE.png, .svg or .pdf; needs matplotlib.",
)
@click.argument("collectives", nargs=-1)
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    collectives: tuple[str, ...],
    min_bytes: int,
    max_bytes: int,
    factor: float | None,
    step_bytes: int | None,
    json_file: Path | None,
    plot: Path | None,
    **options: Any,
) -> int:
    """Measure latency and bandwidth of COLLECTIVES on the ranks of a job.

    COLLECTIVES are allreduce (default), allgather, reducescatter, broadcast, alltoall, barrier and sendrecv, a message
    from rank 0 to the last rank and back; or all.

    \b
      unidist bench -np 4
      unidist bench allreduce -np 4 -b 4K -e 1G --engine shm --beside gloo,mpi
      unidist bench all -np 8 -H node1:4,node2:4 --json out.json --plot out.png
      unidist bench -np 2 -b 4K -e 4K --named

    The bus bandwidth is that of nccl-tests. Exits with 1 if a result was wrong, else as `unidist launch` does.
    """
    from unidist_bench.command import plot as plots
    from unidist_bench.results import as_json

    order = _order(collectives, _sizes(min_bytes, max_bytes, factor, step_bytes), options)
    if plot is not None:
        plots.check(plot)
    for name, path in (("--json", json_file), ("--plot", plot)):
        if path is not None:
            _check_writable(name, path)
    if _starts_by_mpirun(order, options):
        options["launcher"] = options["launcher"] or "mpi"
    listener = _Listener()
    code = run_program(ctx, _PROGRAM, order.plain(), options, observers=(listener,))
    if listener.refused:
        raise ConfigurationError(listener.refused)
    results = listener.results
    if code or results is None or not listener.is_complete:
        return code or 1
    if json_file is not None:
        json_file.write_text(as_json(results), encoding="utf-8")
    if plot is not None:
        plots.draw(results, plot)
    if results.num_wrong:
        click.echo(f"unidist: error: {results.num_wrong} elements were wrong, see #wrong", err=True)
    return int(results.num_wrong > 0)


class _Listener(JobObserver):
    """Prints the table while rank 0 measures, and keeps the results."""

    wants_output = True

    def __init__(self) -> None:
        self.results: Results | None = None
        self.refused = ""
        self.is_complete = False

    def printed(self, seat: int, lines: Sequence[bytes]) -> None:
        import json

        from unidist_bench.measurement.program import MARK

        for line in lines:
            text = line.decode(errors="replace")
            if seat == 0 and text.startswith(MARK):
                self._take(json.loads(text.removeprefix(MARK)))

    def _take(self, found: dict[str, Any]) -> None:
        from unidist_bench.command import table
        from unidist_bench.results import OURS, Results, row_from, series_from

        match found.pop("kind"):
            case "head":
                self.results = Results(**{**found, "hosts": tuple(found["hosts"]), "series": []})
                _say(table.head(self.results))
            case "series" if self.results is not None:
                self.results.series.append(series_from(found))
            case "row" if self.results is not None:
                row, series = row_from(found), self.results.series[-1]
                if not series.rows:
                    _say(table.title(series, tuple(name for name in row.sides if name != OURS)))
                series.rows.append(row)
                _say([table.line(row, series, self.results.num_ranks)])
            case "refused":
                self.refused = str(found["text"])
            case "end":
                self.is_complete = True


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line)
    sys.stdout.flush()


def _sizes(min_bytes: int, max_bytes: int, factor: float | None, step_bytes: int | None) -> Sizes:
    if factor is not None and step_bytes is not None:
        raise ConfigurationError("--factor and --step-bytes both say what the next size is; give one of them")
    return Sizes(min_bytes, max_bytes, 2.0 if factor is None else factor, step_bytes)


def _order(collectives: tuple[str, ...], sizes: Sizes, options: dict[str, Any]) -> MeasurementOrder:
    """Return the order, and take what says it out of the options.

    Raises:
        ConfigurationError: what is asked for does not go together, or is not installed.
    """
    from unidist_bench.collectives import TRAITS, parse
    from unidist_bench.measurement.order import MeasurementOrder

    found = parse(collectives)
    own = ("root", "in_place", "memory", "named", "warmup", "iterations", "inner", "check")
    taken = {name: options.pop(name) for name in own}
    dtype, op = options.pop("dtype").lower(), options.pop("op").lower()
    if dtype not in list(DType):
        raise unknown_choice("dtype", dtype, map(str, DType))
    if op not in _OPS:
        raise unknown_choice("op", op, _OPS)
    reduces = any(TRAITS[each].reduces for each in found)
    if reduces and DType(dtype).is_complex and _OPS[op] in (ReduceOp.MIN, ReduceOp.MAX):
        raise ConfigurationError(f"--op {op} of --dtype {dtype}: complex numbers have no order; use sum or prod")
    listed = ", ".join(found)
    if taken["in_place"] and not any(TRAITS[each].in_place for each in found):
        raise ConfigurationError(f"--in-place: {listed} cannot work in place")
    if taken["named"] and not any(TRAITS[each].can_be_named for each in found):
        raise ConfigurationError(f"--named: {listed} has no named operation; leave --named out")
    return MeasurementOrder(
        found, sizes, dtype=DType(dtype), op=_OPS[op], beside=_peers(options.pop("beside")), **taken
    )


def _peers(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return the peers, each once.

    Raises:
        ConfigurationError: one is unknown, or not installed.
    """
    names = tuple(dict.fromkeys(name.strip() for item in given for name in item.split(",") if name.strip()))
    for name in names:
        if name not in _PACKAGES:
            raise unknown_choice("peer of --beside", name, _PACKAGES)
        package, what = _PACKAGES[name]
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(f"--beside {name} needs {what}, which is not installed; leave it out")
    return names


def _starts_by_mpirun(order: MeasurementOrder, options: Mapping[str, Any]) -> bool:
    return "mpi" in (*order.beside, options["engine"] or os.environ.get("UNIDIST_ENGINE"))


def _check_writable(option: str, path: Path) -> None:
    if not os.access(path.parent, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise ConfigurationError(f"{option} {path} cannot be written, so nothing was measured; give another file")
