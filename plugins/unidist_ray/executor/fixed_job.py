"""A job with a fixed number of ranks, each an actor of Ray's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayError

from unidist.errors import ConfigurationError, UsageError
from unidist.jobs import rank_order
from unidist.jobs.pool import Answers, call_name, dump_call
from unidist_ray.callbacks import Callback, Callbacks
from unidist_ray.executor.rank_actor import RankActor
from unidist_ray.placement import Room, WorkerSize
from unidist_ray.settings import RaySettings

_GRACE_SEC = 2.0
_LEAVE_SEC = 5.0
_TURN_SEC = 0.5


class FixedJob:
    """Starts the actors, makes them ranks, and runs functions on all at the same time.

    Args:
        settings: time limits.
        size: of a worker.
        bundles: numbers of workers that belong together on a node.
        spread: each bundle has a node of its own.
        use_current_placement_group: see `Room`.
        env: variables of every rank.

    Raises:
        ConfigurationError: there is no room for the workers; or they cannot be the ranks of a job.
    """

    def __init__(
        self,
        settings: RaySettings,
        size: WorkerSize,
        bundles: list[int],
        *,
        spread: bool,
        use_current_placement_group: bool,
        env: Mapping[str, str],
    ) -> None:
        self._ended = ""
        with ExitStack() as stack:
            room = Room(
                size,
                bundles,
                spread=spread,
                use_current=use_current_placement_group,
                timeout=settings.placement_timeout,
            )
            stack.callback(room.close)
            actor = ray.remote(RankActor)
            workers = []
            for index in range(sum(bundles)):
                # No restarts: a rank that comes again would find the others gone on without it.
                options = {**room.options(index), "max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1}
                workers.append(actor.options(**options).remote(tuple(settings.nics or ())))
                stack.callback(ray.kill, workers[-1])
            self._join(workers, env, settings.timeout_s)
            self._stack = stack.pop_all()

    @property
    def num_workers(self) -> int:
        """Number of ranks."""
        return len(self._workers)

    def create(self, cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Make an object on every rank. Raises as `run`."""
        self._call(
            "create",
            dump_call(cls, tuple(args), dict(kwargs), to_other_machines=True),
            call_name(cls),
            range(self.num_workers),
        )

    def run(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        """Call a function on every rank and return the results in rank order.

        The job stays usable if every rank has answered, be it with an exception: then all runtimes are shut down, and
        functions call `init()` again. Otherwise it is ended.

        Raises:
            RemoteError: the function raised, or a rank died; says which rank and why.
            UsageError: the call cannot be pickled, or the job has ended.
        """
        call = dump_call(function, tuple(args), dict(kwargs), to_other_machines=True)
        return self._call("call", call, call_name(function), range(self.num_workers), callbacks)

    def execute(
        self,
        function: Callable[[Any], Any],
        callbacks: Sequence[Callback] | None = None,
        *,
        ranks: Sequence[int] | None = None,
    ) -> list[Any]:
        """Call a function with each rank's object of `create`; see `run`.

        Args:
            function: to call.
            callbacks: get what the ranks log.
            ranks: on which; default: on all.
        """
        called = range(self.num_workers) if ranks is None else ranks
        call = dump_call(function, (), {}, to_other_machines=True)
        return self._call("execute", call, call_name(function), called, callbacks)

    def run_remote(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Call a function on every rank and return references to the results at once, in rank order."""
        self._check_usable()
        call = dump_call(function, tuple(args), dict(kwargs), to_other_machines=True)
        for worker in self._workers:
            worker.log_to.remote(None)
        return [worker.call_raising.remote(call) for worker in self._workers]

    def close(self) -> None:
        """End all actors and give the room back. Idempotent."""
        if not self._ended:
            left = [worker.leave.remote() for worker in self._workers]
            with contextlib.suppress(RayError):  # they are killed in any case
                ray.wait(left, num_returns=len(left), timeout=_LEAVE_SEC)
        self._end("it was shut down")

    def _join(self, workers: list[Any], env: Mapping[str, str], limit_sec: float) -> None:
        """Make ranks of the workers, and sort them by rank; each step takes `limit_sec` at most."""
        env = {**env, "UNIDIST_START_TIMEOUT_SEC": f"{limit_sec:g}"}
        try:
            told = ray.get([worker.introduce.remote() for worker in workers], timeout=limit_sec)
            offers = [offer for offer, *_ in told]
            gpus: dict[str, list[str]] = {}
            for _, node, numbers, _ in told:
                gpus.setdefault(node, []).extend(numbers)
            joins = []
            for worker, (_, node, _, _) in zip(workers, told, strict=True):
                # Each rank sees the GPUs of all ranks of its node, and takes that of its local rank.
                visible = {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(gpus[node]))} if gpus[node] else {}
                joins.append(worker.join.remote(offers, {**visible, **env}))
            ray.get(joins, timeout=limit_sec)
        except GetTimeoutError as exc:
            raise ConfigurationError(
                f"not all of {len(workers)} actors of Ray have started within {limit_sec:g} seconds (timeout_s of "
                "create_settings). Does a node lack memory, or unidist?"
            ) from exc
        except RayError as exc:
            raise ConfigurationError(f"Ray's actors cannot be the ranks of a job: {exc}") from exc
        ranks = rank_order(offers)
        by_rank = sorted(range(len(workers)), key=ranks.__getitem__)
        self._workers = [workers[index] for index in by_rank]
        self._who = [told[index][3] for index in by_rank]

    def _call(
        self,
        method: str,
        call: bytes,
        name: str,
        ranks: Sequence[int],
        callbacks: Sequence[Callback] | None = None,
    ) -> list[Any]:
        self._check_usable()
        with Callbacks(callbacks) as logged:
            return self._called(method, call, name, ranks, logged)

    def _called(self, method: str, call: bytes, name: str, ranks: Sequence[int], logged: Callbacks) -> list[Any]:
        answers = Answers(ranks, name)
        # A rank runs one method after the other: it logs there before it is called.
        for rank in ranks:
            self._workers[rank].log_to.remote(logged.queue)
        pending = {getattr(self._workers[rank], method).remote(call): rank for rank in ranks}
        limit: float | None = None
        try:
            while pending and (limit is None or time.monotonic() < limit):
                ready, _ = ray.wait([*pending], timeout=_TURN_SEC)
                for reference in ready:
                    self._take(answers, pending.pop(reference), reference)
                logged.turn()
                if answers.has_failed and limit is None:
                    limit = time.monotonic() + _GRACE_SEC
        except BaseException:  # KeyboardInterrupt above all: the ranks are still at work on this call
            self._end("a call of it was interrupted")
            raise
        if answers.lost_ranks:
            self._end(f"it lost ranks {answers.lost_ranks}")
        elif answers.has_failed:
            self._reset()
        return answers.results()

    def _take(self, answers: Answers, rank: int, reference: Any) -> None:
        try:
            answers.take(rank, ray.get(reference))
        except (ActorDiedError, ActorUnavailableError) as exc:
            answers.lost(rank, f"({self._who[rank]}) died ({_first_line(exc)})")
        except RayError as exc:
            answers.lost(rank, f"({self._who[rank]}) did not answer: {_first_line(exc)}")

    def _reset(self) -> None:
        try:
            ray.get([worker.reset.remote() for worker in self._workers], timeout=_LEAVE_SEC)
        except RayError as exc:
            self._end(f"a rank could not be shut down after a failure ({_first_line(exc)})")

    def _check_usable(self) -> None:
        if self._ended:
            raise UsageError(f"this executor cannot run anything more: {self._ended}. Call start() again.")

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = reason
            self._stack.close()


def _first_line(error: BaseException) -> str:
    """Return what of Ray's text says why; it goes on with what Ray knows of the actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    why = next((line for line in lines if "because" in line or "error" in line.lower()), None)
    return why or (lines[0] if lines else type(error).__name__)
