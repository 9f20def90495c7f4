"""`run` and `HorovodRunner`: functions as the ranks of a job on Spark's executors."""

from __future__ import annotations

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyspark import AccumulatorParam, InheritableThread, SparkContext
from typing_extensions import override

import unidist
from unidist.errors import ConfigurationError, RemoteError, UsageError
from unidist.jobs.pool import Answers, Record, call_name, dump_call
from unidist_spark.task import Task

_log = logging.getLogger("unidist.spark")

START_SEC = 600.0
_GRACE_SEC = 3.0
_TURN_SEC = 0.05
_CANCEL_SEC = 30.0


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    strategy: str | None = None,
    engine: str | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `num_proc` ranks, each in a task of Spark's, and return the results in rank order.

        unidist.spark.run(train, num_proc=4)

    The tasks are a stage in barrier mode, so all start together. Ranks of one machine exchange data in shared memory,
    those of several over TCP. What they print is in the logs of Spark's executors.

    Args:
        fn: the whole training script of a rank: it calls `init()` itself.
        args: positional arguments.
        kwargs: keyword arguments.
        num_proc: number of ranks; default: `spark.default.parallelism`.
        start_timeout: longest wait in seconds for Spark to start all tasks, and of the ranks for each other in
            `init()`; default: 600.
        use_mpi: Horovod's; True is an error, because Spark starts the ranks.
        use_gloo: True: the engine `gloo`.
        extra_mpi_args: as `use_mpi`.
        env: variables of every rank.
        stdout: Horovod's; a warning and no effect, because ranks write to the logs of the executors.
        stderr: as `stdout`.
        verbose: 0: say nothing of the number of ranks.
        nics: network interfaces; each host uses the first of them that it has. None: the one to the outside.
        prefix_output_with_timestamp: as `stdout`.
        executable: Horovod's; an error, because the executors' Python runs the ranks (PYSPARK_PYTHON).
        strategy: as `--strategy`; default: UNIDIST_STRATEGY of the executors.
        engine: as `--engine`; default: UNIDIST_ENGINE of the executors, else auto.

    Raises:
        RemoteError: the function raised, or a rank died; says which rank and why, and `__cause__` is the exception
            where it can be brought here. The other ranks are ended.
        ConfigurationError: Spark did not start all tasks in time, or an argument cannot be followed.
        UsageError: there is no Spark, or the call cannot be pickled.
    """
    refused = {
        "use_mpi": (use_mpi, "Spark starts the ranks; leave it out"),
        "extra_mpi_args": (extra_mpi_args, "Spark starts the ranks; leave it out"),
        "executable": (executable, "the executors' Python runs the ranks; set PYSPARK_PYTHON"),
    }
    refuse("run", refused)
    ignored = {"stdout": stdout, "stderr": stderr, "prefix_output_with_timestamp": prefix_output_with_timestamp}
    if names := [name for name, value in ignored.items() if value]:
        _log.warning("run: %s: no effect, because ranks write to the logs of Spark's executors", ", ".join(names))
    spark = active_spark("run")
    if num_proc is None:
        num_proc = spark.defaultParallelism
    if num_proc < 1:
        raise ConfigurationError(f"num_proc={num_proc}: a job has at least 1 process.")
    if verbose:
        _log.info("running %d ranks as tasks of Spark", num_proc)
    start_sec = START_SEC if start_timeout is None else float(start_timeout)
    variables = rank_variables(start_sec, strategy, engine or ("gloo" if use_gloo else None), env)
    failures = spark.accumulator([], _Appended())
    task = Task(
        dump_call(fn, tuple(args), dict(kwargs or {}), to_other_machines=True), variables, tuple(nics or ()), failures
    )
    return _Stage(spark, num_proc, task, call_name(fn)).run(start_sec)


def refuse(function: str, arguments: Mapping[str, tuple[Any, str]]) -> None:
    """Raise for arguments of Horovod's that cannot be followed.

    Args:
        function: of `unidist.spark`.
        arguments: their values, and what to do instead.

    Raises:
        ConfigurationError: one of them is given.
    """
    for name, (value, why) in arguments.items():
        if value:
            raise ConfigurationError(f"unidist.spark.{function}: {name}={value!r} cannot be followed: {why}.")


def active_spark(function: str) -> SparkContext:
    """Return the running Spark.

    Raises:
        UsageError: there is none.
    """
    spark = SparkContext._active_spark_context
    if spark is None:
        raise UsageError(f"unidist.spark.{function} needs a running Spark: make a SparkSession first.")
    return spark


def rank_variables(
    start_sec: float, strategy: str | None, engine: str | None, env: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the variables of every rank."""
    chosen = {"UNIDIST_STRATEGY": strategy, "UNIDIST_ENGINE": engine}
    return {
        "UNIDIST_START_TIMEOUT_SEC": f"{start_sec:g}",
        **{name: value for name, value in chosen.items() if value is not None},
        **(env or {}),
    }


class HorovodRunner:
    """Runs a function as Databricks' class of this name does.

    Args:
        np: number of ranks, each in a task of Spark's; 0: as many as there are slots; negative: so many processes on
            the driver's machine, without Spark.
        driver_log_verbosity: Databricks'; "log_callback_only", the default, as ranks write to the executors' logs.
    """

    def __init__(self, np: int, driver_log_verbosity: str = "log_callback_only") -> None:
        if driver_log_verbosity != "log_callback_only":
            raise ConfigurationError(
                f"HorovodRunner: driver_log_verbosity={driver_log_verbosity!r} cannot be followed: ranks write to the "
                "logs of Spark's executors; leave it out."
            )
        self.np = np

    def run(self, main: Callable[..., Any], **kwargs: Any) -> Any:
        """Call `main(**kwargs)` on every rank and return the result of rank 0. Raises as `run`."""
        if self.np < 0:
            return unidist.run(main, kwargs=kwargs, num_proc=-self.np)[0]
        return run(main, kwargs=kwargs, num_proc=self.np or None)[0]


class _Appended(AccumulatorParam[Any]):
    """Entries added by tasks, as a list."""

    @override
    def zero(self, value: Any) -> Any:
        return []

    @override
    def addInPlace(self, value1: Any, value2: Any) -> Any:
        return value1 + value2


class _Stage:
    """One stage in barrier mode, run by a separate thread that this one watches.

    A task whose rank fails does not fail, but returns what happened: of tasks that fail, Spark only keeps a text.

    Args:
        spark: the context.
        num_proc: number of tasks.
        task: what each does.
        name: what is called, for messages.
    """

    def __init__(self, spark: SparkContext, num_proc: int, task: Task, name: str) -> None:
        self._spark = spark
        self._num_proc = num_proc
        self._task = task
        self._group = f"unidist-{uuid.uuid4().hex}"
        self._answers = Answers(range(num_proc), name)
        self._records: list[Record] = []
        self._error: BaseException | None = None

    def run(self, start_sec: float) -> list[Any]:
        thread = InheritableThread(target=self._collect, name="unidist-spark", daemon=True)
        thread.start()
        try:
            self._watch(thread, time.monotonic() + start_sec, start_sec)
        finally:
            if thread.is_alive():
                self._spark.cancelJobGroup(self._group)
                thread.join(_CANCEL_SEC)
        self._answers.add(self._task.failures.value)
        self._answers.add(self._records)
        if self._error is not None and not self._answers.has_failed:
            raise _lost(self._error, self._answers.name) from self._error
        return self._answers.results(timeout_sec=start_sec)

    def _collect(self) -> None:
        self._spark.setJobGroup(self._group, f"unidist: {self._num_proc} ranks", interruptOnCancel=True)
        try:
            slots = self._spark.parallelize(range(self._num_proc), self._num_proc)
            self._records = slots.barrier().mapPartitions(self._task).collect()
        except BaseException as exc:
            self._error = exc

    def _watch(self, thread: threading.Thread, deadline: float, start_sec: float) -> None:
        """Return when the stage has ended, or is to be ended because a rank has failed."""
        has_started = False
        limit = float("inf")
        while thread.is_alive() and time.monotonic() < limit:
            thread.join(_TURN_SEC)
            self._answers.add(self._task.failures.value)
            if self._answers.has_failed and limit == float("inf"):
                limit = time.monotonic() + _GRACE_SEC
            has_started = has_started or self._answers.has_failed or self._num_active() >= self._num_proc
            if not has_started and time.monotonic() > deadline and thread.is_alive():
                raise ConfigurationError(
                    f"Spark did not start {self._num_proc} tasks at the same time in {start_sec:g} s; it has "
                    f"{self._spark.defaultParallelism} slots. Give a smaller num_proc, more executors, or a longer "
                    "start_timeout."
                )

    def _num_active(self) -> int:
        tracker = self._spark.statusTracker()
        active = 0
        for job in tracker.getJobIdsForGroup(self._group):
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info is not None else ():
                found = tracker.getStageInfo(stage)
                if found is not None:
                    active += found.numActiveTasks + found.numCompletedTasks
        return active


def _lost(error: BaseException, name: str) -> RemoteError:
    """Return the error for a task that has ended without a word, as it does with its executor."""
    text = str(error)
    reason = next((line for line in text.splitlines() if "barrier" in line), text.strip().partition("\n")[0])
    task = re.search(r"ResultTask\(\d+, (\d+)\)", text)
    if task is None:
        return RemoteError(f"Spark could not run {name}: {reason.strip()}", rank=-1, remote_traceback="")
    return RemoteError(
        f"the rank of Spark's task {task[1]} was lost during {name}, with its executor: {reason.strip()}",
        rank=int(task[1]),
        remote_traceback="",
    )
