"""Measurements of a machine, as a file: `unidist doctor --measure` writes it, `unidist plan --measured` reads."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unidist.cost_model.collectives import Link, cost
from unidist.errors import ConfigurationError

FORMAT = "unidist measurements 1"


@dataclass(frozen=True)
class Line:
    """A straight line through measured times: `fixed` seconds, and `each` second for a byte."""

    fixed: float
    each: float


@dataclass(frozen=True)
class Measurements:
    """One host.

    Args:
        host: its name.
        num_ranks: ranks that measured at the same time.
        engine: that moved the bytes.
        dtype: of the matrices.
        flops: floating-point operations in a second of each rank, in matrix products.
        memory_bandwidth: bytes in a second that each rank reads and writes.
        memory_bytes: of the host, for each rank.
        message: time of a message from one rank to another.
        allreduce: time of an all-reduce over all ranks.
    """

    host: str
    num_ranks: int
    engine: str
    dtype: str
    flops: float
    memory_bandwidth: float
    memory_bytes: float
    message: Line
    allreduce: Line

    def __post_init__(self) -> None:
        """Check what must hold for a plan."""
        for name in ("flops", "memory_bandwidth", "memory_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"measurements with {name}={getattr(self, name)}: it must be above 0")
        if self.num_ranks < 2:
            raise ConfigurationError(f"measurements of {self.num_ranks} ranks say nothing of messages; take 2 or more")

    @property
    def messages(self) -> Link:
        """The link that single messages see."""
        return Link(self.message.fixed, 1 / self.message.each if self.message.each else math.inf)

    @property
    def collectives(self) -> Link:
        """The link on which a ring would take as long as the engine's own all-reduce did."""
        ring = cost("allreduce", "ring", self.num_ranks)
        bandwidth = ring.moves / self.allreduce.each if self.allreduce.each else math.inf
        return Link(self.allreduce.fixed / ring.latencies, bandwidth)


def fitted(points: Sequence[tuple[float, float]]) -> Line:
    """Return the line through `(bytes, seconds)` with the least sum of squared relative errors.

    Relative, because times of small and large messages lie three powers of ten apart, and the smallest ones alone tell
    the latency. Neither number becomes negative: where the best line would begin below 0, it begins at 0.

    Raises:
        ConfigurationError: fewer than two different sizes, or a time that is not above 0.
    """
    if len({size for size, _ in points}) < 2 or any(seconds <= 0 for _, seconds in points):
        raise ConfigurationError(f"{len(points)} points give no line: measure two sizes or more, with times above 0")
    # Minimise sum (fixed/t + each n/t - 1)^2: two normal equations.
    a = sum(1 / t**2 for _, t in points)
    b = sum(n / t**2 for n, t in points)
    c = sum((n / t) ** 2 for n, t in points)
    d, e = sum(1 / t for _, t in points), sum(n / t for n, t in points)
    determinant = a * c - b * b
    fixed, each = (d * c - b * e) / determinant, (a * e - b * d) / determinant
    if each <= 0:  # the time does not grow with the size: all of it is latency, up to the largest size
        return Line(d / a, 0.0)
    return Line(fixed, each) if fixed > 0 else Line(0.0, e / c)


def write(found: Measurements, path: Path) -> None:
    """Write the file."""
    path.write_text(json.dumps({"format": FORMAT, **asdict(found)}, indent=2) + "\n", encoding="utf-8")


def read(path: Path) -> Measurements:
    """Return what a file holds.

    Raises:
        ConfigurationError: there is no such file, or it is none of `unidist doctor --measure`.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            raise ValueError("another format")
        message, allreduce = Line(**found.pop("message")), Line(**found.pop("allreduce"))
        return Measurements(message=message, allreduce=allreduce, **found)
    except OSError as exc:
        raise ConfigurationError(
            f"{path} cannot be read: {exc.strerror}. `unidist doctor --measure` writes one"
        ) from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigurationError(
            f"{path} holds no measurements in the format {FORMAT!r} ({exc}). `unidist doctor --measure` writes them"
        ) from exc
