"""The task of Spark's that has one rank: a child process of it."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark import BarrierTaskContext

from unidist.jobs import ClusterRank
from unidist.jobs.pool import RankPool, Record

if TYPE_CHECKING:
    from pyspark import Accumulator


class Task:
    """The work of each task of a stage, for `mapPartitions`. Spark carries it to the executors.

    The rank is a child process of the task's, so that it begins with nothing of an earlier job, and can be named when
    it dies. If the task ends, so does the rank.

    Args:
        call: of `dump_call`.
        env: variables of the rank.
        interfaces: the host uses the first of these network interfaces that it has.
        failures: takes the records of ranks that fail; reaches the driver when the task ends.
    """

    def __init__(
        self, call: bytes, env: Mapping[str, str], interfaces: Sequence[str], failures: Accumulator[list[Record]]
    ) -> None:
        self._call = call
        self._env = dict(env)
        self._interfaces = tuple(interfaces)
        self.failures = failures

    def __call__(self, _: Iterator[Any]) -> Iterator[Record]:
        """Run the rank; yields its record."""
        context = BarrierTaskContext.get()
        with ClusterRank(address=_address(context), interfaces=self._interfaces) as rank:
            share = rank.share(context.allGather(rank.offer))
            resources = {name: list(each.addresses) for name, each in context.resources().items()}
            with RankPool(1, env=self._env, share=share, timeout=None) as pool:
                answers = pool.call(_run, [self._call, resources.get("gpu", [])])
            if answers.has_failed:
                self.failures.add(answers.records)
            yield from answers.records


def get_available_devices() -> list[str]:
    """Return the GPUs that Spark has given to the task of this rank, as Spark names them ("0"); [] outside of a rank.

    They are those of the resource `gpu` (`spark.task.resource.gpu.amount`).
    """
    return list(_devices)


_devices: list[str] = []


def _run(call: bytes, devices: list[str]) -> Any:
    _devices[:] = devices
    function, args, kwargs = pickle.loads(call)
    return function(*args, **kwargs)


def _address(context: BarrierTaskContext) -> str:
    """Return the address at which other hosts reach this one: by which Spark knows the executor."""
    host = context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0].strip("[]")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return str(found[0][4][0])
    except OSError:
        return ""  # of the interface to the outside
