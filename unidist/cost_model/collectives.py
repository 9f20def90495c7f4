"""The cost of collectives, by algorithm: latency and bandwidth (the alpha-beta model).

A message of n bytes takes alpha + n beta; adding up n bytes takes n gamma. Each algorithm is then linear in n, and is
written down as three numbers: how many latencies, how often each byte is moved, how often it is added up, by the rank
that has most to do. Sources: Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in
MPICH", sections 4 to 7; Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", for the ring. Where the number of ranks is no power of two, the costs are those of the algorithms in
`unidist.algorithms`, which tests compare message by message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unidist.cost_model.step import Operation
from unidist.errors import ConfigurationError, unknown_choice


@dataclass(frozen=True)
class Link:
    """The speed of messages between two ranks.

    Args:
        latency: seconds until the first byte arrives (alpha).
        bandwidth: bytes per second, in each direction at once (1 / beta).
        reduction: bytes per second that a rank adds up (1 / gamma); infinite if `bandwidth` includes it.
    """

    latency: float
    bandwidth: float
    reduction: float = float("inf")

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not 0 <= self.latency < float("inf"):
            raise ConfigurationError(f"a latency of {self.latency:g} s: give a number that is 0 or more")
        for name in ("bandwidth", "reduction"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"a {name} of {getattr(self, name):g} bytes/s: give a number above 0")


@dataclass(frozen=True)
class Cost:
    """The cost of one algorithm on a certain number of ranks: `latencies` alpha + n (`moves` beta + `sums` gamma)."""

    latencies: float
    moves: float
    sums: float = 0.0

    def seconds(self, num_bytes: float, link: Link) -> float:
        """Return the time for `num_bytes`."""
        return self.latencies * link.latency + num_bytes * self.slope(link)

    def slope(self, link: Link) -> float:
        """Return the seconds for each byte."""
        return self.moves / link.bandwidth + self.sums / link.reduction


def _rounds(num_ranks: int) -> int:
    """Return log2, rounded up: the rounds of a binomial tree."""
    return (num_ranks - 1).bit_length()


def _part(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


def _naive_allreduce(p: int) -> Cost:
    return Cost(2 * (p - 1), 2 * (p - 1), p - 1)


def _ring_allreduce(p: int) -> Cost:
    return Cost(2 * (p - 1), 2 * _part(p), _part(p))


def _tree_allreduce(p: int) -> Cost:
    return Cost(2 * _rounds(p), 2 * _rounds(p), _rounds(p))


def _butterfly_allreduce(p: int) -> Cost:
    """Recursive halving, then doubling; ranks beyond a power of two hand over first and get the result last."""
    core = 1 << (p.bit_length() - 1)
    more = 0 if core == p else 1
    return Cost(2 * _rounds(core) + 2 * more, 2 * _part(core) + 2 * more, _part(core) + more)


def _doubling_allreduce(p: int) -> Cost:
    """Recursive doubling: everything with a partner in each round (Thakur et al., section 6)."""
    core = 1 << (p.bit_length() - 1)
    more = 0 if core == p else 1
    return Cost(_rounds(core) + 2 * more, _rounds(core) + 2 * more, _rounds(core) + more)


def _halving_reducescatter(p: int) -> Cost:
    """Recursive halving (Thakur et al., section 5), with their costs where p is no power of two."""
    if p & (p - 1) == 0:
        return Cost(_rounds(p), _part(p), _part(p))
    return Cost(p.bit_length() + 1, 2, 1 + _part(p))


ALGORITHMS: dict[Operation, dict[str, Callable[[int], Cost]]] = {
    "allreduce": {
        "naive": _naive_allreduce,
        "ring": _ring_allreduce,
        "tree": _tree_allreduce,
        "butterfly": _butterfly_allreduce,
        "doubling": _doubling_allreduce,
    },
    "reducescatter": {
        "ring": lambda p: Cost(p - 1, _part(p), _part(p)),
        "halving": _halving_reducescatter,
    },
    "allgather": {
        "ring": lambda p: Cost(p - 1, _part(p)),
        "bruck": lambda p: Cost(_rounds(p), _part(p)),
    },
    "broadcast": {
        "tree": lambda p: Cost(_rounds(p), _rounds(p)),
        "scatter-allgather": lambda p: Cost(_rounds(p) + p - 1, 2 * _part(p)),
    },
    "sendrecv": {"direct": lambda p: Cost(1, 1)},
    "alltoall": {"pairwise": lambda p: Cost(p - 1, _part(p))},
}
"""For each operation the cost by algorithm on p ranks. n bytes are always the whole: of a reduce-scatter what is given,
of an all-gather what comes out, of an all-to-all what one rank gives."""


def cost(operation: Operation, algorithm: str, num_ranks: int) -> Cost:
    """Return the cost of an algorithm; nothing among fewer than two ranks.

    Raises:
        ConfigurationError: there is no such operation or algorithm.
    """
    if operation not in ALGORITHMS:
        raise unknown_choice("operation", operation, ALGORITHMS)
    if algorithm not in ALGORITHMS[operation]:
        raise unknown_choice(f"algorithm of {operation}", algorithm, ALGORITHMS[operation])
    return Cost(0, 0) if num_ranks < 2 else ALGORITHMS[operation][algorithm](num_ranks)


def fastest(operation: Operation, num_ranks: int, num_bytes: float, link: Link) -> tuple[str, float]:
    """Return the algorithm that takes least time for `num_bytes`, and the time; of equal ones the first."""
    return min(
        ((name, cost(operation, name, num_ranks).seconds(num_bytes, link)) for name in ALGORITHMS[operation]),
        key=lambda found: found[1],
    )


def crossover(operation: Operation, first: str, second: str, num_ranks: int, link: Link) -> float | None:
    """Return the bytes from which `second` is faster than `first`, which is so below; None if one always is."""
    a, b = cost(operation, first, num_ranks), cost(operation, second, num_ranks)
    ahead = (b.latencies - a.latencies) * link.latency
    gained = a.slope(link) - b.slope(link)
    if ahead <= 0 or gained <= 0:
        return None
    return ahead / gained
