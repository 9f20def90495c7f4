"""The actor of one rank."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import ray

from unidist.jobs import ClusterRank
from unidist.jobs.pool import answer_of
from unidist.runtime import begin_job, current, is_initialized
from unidist_ray import ray_logger


class RankActor:
    """A rank of a job, in a process of Ray's. Its methods are called by the executor alone.

    Args:
        interfaces: the address of the first of these network interfaces that the node has is its own; empty: the
            address by which Ray knows the node.
    """

    def __init__(self, interfaces: Sequence[str] = ()) -> None:
        self._stack = ExitStack()
        self._executable: Any = None
        node = ray.get_runtime_context().get_node_id()
        self._rank = self._stack.enter_context(
            ClusterRank(node=node, address=ray.util.get_node_ip_address(), interfaces=interfaces)
        )

    def introduce(self) -> tuple[str, str, list[str], str]:
        """Return the offer of this process, its node, its GPUs, and words that name it."""
        node = ray.get_runtime_context().get_node_id()
        gpus = [str(number) for number in ray.get_gpu_ids()]
        return self._rank.offer, node, gpus, f"pid {os.getpid()}, node {socket.gethostname()}/{node[:8]}"

    def join(self, offers: Sequence[str], env: Mapping[str, str]) -> None:
        """Become the rank, with these variables."""
        self._stack.enter_context(self._rank.joined(offers, env=env))

    def log_to(self, queue: Any) -> None:
        """Have `ray_logger.log` put values into a queue of Ray's; None: nowhere."""
        ray_logger.configure(queue)

    def create(self, call: bytes) -> bytes:
        """Make the object that `execute` hands to functions, by a call of `dump_call`, and keep it here."""

        def make() -> None:
            function, args, kwargs = pickle.loads(call)
            self._executable = function(*args, **kwargs)

        return self._answer(make)

    def call(self, call: bytes) -> bytes:
        """Run a call of `dump_call`."""

        def run() -> Any:
            function, args, kwargs = pickle.loads(call)
            return function(*args, **kwargs)

        return self._answer(run)

    def execute(self, call: bytes) -> bytes:
        """Run a call of `dump_call`, with the object of `create` as its first argument."""

        def run() -> Any:
            function, args, kwargs = pickle.loads(call)
            return function(self._executable, *args, **kwargs)

        return self._answer(run)

    def call_raising(self, call: bytes) -> Any:
        """Run a call of `dump_call`, and return what it returns, or raise what it raises."""
        function, args, kwargs = pickle.loads(call)
        try:
            return function(*args, **kwargs)
        except BaseException as exc:
            _tell_peers(exc)
            raise

    def reset(self) -> None:
        """End the runtime after a call that failed somewhere: the next one may call `init()` again."""
        begin_job()

    def leave(self) -> None:
        """End the runtime, and the meeting of the ranks."""
        self._executable = None
        self._stack.close()

    @staticmethod
    def _answer(function: Callable[[], Any]) -> bytes:
        def run() -> Any:
            try:
                return function()
            except BaseException as exc:
                _tell_peers(exc)
                raise

        return answer_of(run)


def _tell_peers(error: BaseException) -> None:
    """Have the operations end in which other ranks wait for this one."""
    if is_initialized():
        current().abort(f"rank {current().topology.rank} ended with {type(error).__name__}: {error}")
