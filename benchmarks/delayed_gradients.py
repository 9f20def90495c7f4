"""How large a learning rate may be when gradients are old: the limits of theory, and those of the real servers.

Gradient descent on a quadratic of curvature 1 by gradients that are `delay` updates old, w' = w - rate * w_delayed, is
stable if and only if rate < 2 sin(pi / (2 (2 delay + 1))) (Levin and May 1976, "A note on difference-delay equations").
N workers that push in turn, and fetch when they have pushed, have delays of N - 1.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.jobs import ROOT
from unidist_parameter_server.optimizers import Momentum
from unidist_parameter_server.store import Contents, Push

if TYPE_CHECKING:
    from unidist_parameter_server.store.shards import StoreShard

sys.path.insert(0, str(ROOT / "tests" / "helpers"))

DELAYS = (0, 1, 2, 3, 7)
_UPDATES, _HALVINGS = 400, 9


def limit(delay: int) -> float:
    """Return the smallest rate that is not stable, by theory."""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


def grows(num_workers: int, rate: float, *, updates: int = _UPDATES) -> bool:
    """Let workers push in turn to a server process, and return whether the parameters grow.

    Args:
        num_workers: each gradient is one fewer updates old.
        rate: the learning rate.
        updates: how many.
    """
    from parameter_servers import COUNT, RemoteWorld, values_of

    world = RemoteWorld(num_workers)
    stores = [world.store(worker, meets=False) for worker in range(num_workers)]
    try:

        def write(shard: StoreShard, contents: Contents) -> None:
            contents.values[:] = 1.0

        for store in stores:
            store.fill(write)
        read = [values_of(store) for store in stores]
        middle = 0.0
        for number in range(updates):
            worker = number % num_workers
            store, gradient = stores[worker], read[worker]
            push = Push(
                number // num_workers + 1,
                lambda shard, gradient=gradient: gradient[shard.begin : shard.begin + shard.count],
                [Momentum(rate)] * 2,
                [True] * 2,
                is_kept=True,
            )
            store.push_all(range(len(store.shards)), push)
            read[worker] = values_of(store)
            if number == updates // 2:
                middle = max(float(np.abs(values).max()) for values in read)
        assert len(read[0]) == COUNT
        return max(float(np.abs(values).max()) for values in read) > middle
    finally:
        for store in stores:
            store.leave()
        world.close()


def measured_limit(delay: int) -> float:
    """Return the rate above which the parameters grow, by bisection."""
    low, high = 0.5 * limit(delay), 1.5 * limit(delay)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if grows(delay + 1, middle) else (middle, high)
    return (low + high) / 2


def main() -> None:
    """Print the table of docs/parameter-server.md."""
    print("| delay | largest rate by theory | by the servers |\n|---|---|---|")
    for delay in DELAYS:
        print(f"| {delay} | {limit(delay):.3f} | {measured_limit(delay):.3f} |", flush=True)


if __name__ == "__main__":
    main()
