"""`run_elastic`: an elastic job on Spark's executors, whose ranks come and go.

Barrier mode ends all tasks of a stage when one is lost. So each place of the job is a job of Spark's with a single
task, in which an agent of unidist's launcher runs one rank. The launcher runs here, in the driver. A place whose
executor is lost is asked of Spark again, and comes back when there is a slot for it.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pyspark import InheritableThread, SparkContext, TaskContext
from typing_extensions import override

from unidist.errors import ConfigurationError, UsageError
from unidist.jobs.pool import Record, call_name, dump_call
from unidist.launcher import ElasticLimits, Host, Job
from unidist_launch.elastic_calls import CallAgents, call_command, results_of, run_agent, run_call
from unidist_spark.runner import START_SEC, active_spark, rank_variables, refuse

_ELASTIC_SEC = 600.0
_LEAVE_SEC = 10.0
_CANCEL_SEC = 30.0
_INTERRUPTED = 130


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    strategy: str | None = None,
    engine: str | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on ranks that come and go, and return the results of those at the end, in rank order.

        unidist.spark.run_elastic(train, num_proc=4, min_num_proc=2)

    The job goes on when a rank or an executor is lost, and grows again when Spark has a slot. Each rank
    counts as a separate host: data goes over TCP, and `local_rank()` is 0. The ranks' output is shown here. Call it in
    the main thread, where signals are handled: one that ends this process ends the ranks first.

    Args:
        fn: an elastic script of a rank: it calls `init()` and `elastic.run` itself, see docs/elastic.md.
        args: positional arguments.
        kwargs: keyword arguments.
        num_proc: number of ranks to begin with; default: `spark.default.parallelism`.
        min_num_proc: with fewer the job waits for others; default: `num_proc`.
        max_num_proc: at most so many; default: `num_proc`.
        start_timeout: longest wait in seconds for `num_proc` ranks; then `min_num_proc` will do. Default: 600.
        elastic_timeout: longest wait in seconds for `min_num_proc` ranks; default: 600.
        reset_limit: so often may ranks come or go; default: any number of times.
        env: variables of every rank.
        stdout: Horovod's; an error, because ranks are shown on the driver's own.
        stderr: as `stdout`.
        verbose: 0: standard output of the ranks is not shown.
        nics: network interfaces; each host uses the first of them that it has. None: that by which it reaches the
            driver.
        prefix_output_with_timestamp: each line of the ranks is shown with the time.
        min_np: Horovod's old name of `min_num_proc`.
        max_np: Horovod's old name of `max_num_proc`.
        strategy: as `--strategy`; default: UNIDIST_STRATEGY of the executors.
        engine: as `--engine`; default: UNIDIST_ENGINE of the executors, else auto.

    Raises:
        RemoteError: the job ended with an error; says which rank failed, and why. Nothing is left running.
        ConfigurationError: numbers that do not go together, or an argument that cannot be followed.
        UsageError: there is no Spark, this is not the main thread, or the call cannot be pickled.
    """
    why = "ranks are shown on the driver's own; leave it out"
    refuse("run_elastic", {"stdout": (stdout, why), "stderr": (stderr, why)})
    spark = active_spark("run_elastic")
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            f"unidist.spark.run_elastic was called in the thread {threading.current_thread().name!r}: call it in the "
            "main thread, where signals arrive."
        )
    num_proc = spark.defaultParallelism if num_proc is None else num_proc
    least = next((number for number in (min_num_proc, min_np) if number is not None), num_proc)
    most = next((number for number in (max_num_proc, max_np) if number is not None), num_proc)
    if not 1 <= least <= num_proc <= most:
        raise ConfigurationError(
            f"min_num_proc={least}, num_proc={num_proc}, max_num_proc={most}: each is at least 1, and none is larger "
            "than the next."
        )
    start_sec = START_SEC if start_timeout is None else float(start_timeout)
    job = Job(
        call_command(),
        num_proc,
        env=rank_variables(start_sec, strategy, engine, env),
        shows_stdout=bool(verbose),
        timestamps=prefix_output_with_timestamp,
        hosts=tuple(Host(f"place-{number}", 1) for number in range(most)),
        network_interfaces=tuple(nics or ()),
        start_timeout=timedelta(seconds=start_sec),
        elastic=ElasticLimits(
            least,
            most,
            reset_limit=reset_limit,
            timeout=timedelta(seconds=_ELASTIC_SEC if elastic_timeout is None else float(elastic_timeout)),
        ),
    )
    call = dump_call(fn, tuple(args), dict(kwargs or {}), to_other_machines=True)
    ended = run_call(job, _Places(spark, call))
    if ended.code == _INTERRUPTED:
        raise KeyboardInterrupt
    return results_of(ended, call_name(fn))


class _Places(CallAgents):
    """Starts agents in tasks of Spark's.

    Args:
        spark: the context.
        call: what each rank runs.
    """

    def __init__(self, spark: SparkContext, call: bytes) -> None:
        super().__init__(spark.getConf().get("spark.driver.host", "127.0.0.1"))
        self._spark = spark
        self._call = call
        self._tasks: dict[str, _Task] = {}

    @override
    def summon(self, host: Host, order: bytes) -> None:
        task = _Task(self._spark, f"unidist: {host.name}", order, self._call)
        self._tasks[host.name] = task
        task.start()

    @override
    def problem(self, host: Host) -> str:
        task = self._tasks[host.name]
        return "" if task.is_alive() else task.ended or "Spark ran its task twice, as an executor was lost"

    @override
    def dismiss(self, host: Host, *, patient: bool) -> None:
        task = self._tasks.pop(host.name)
        task.join(_LEAVE_SEC if patient else 0)
        if task.is_alive():
            task.cancel()
        if patient:  # at the end: no task is left running
            task.join(_CANCEL_SEC)
        self.records += task.records


class _Task:
    """A job of Spark's with a single task, in which an agent runs."""

    def __init__(self, spark: SparkContext, name: str, order: bytes, call: bytes) -> None:
        self.ended = ""
        """How the agent has ended."""
        self.records: list[Record] = []
        self._spark = spark
        self._name = name
        self._body = _Body(order, call)
        self._group = f"unidist-{uuid.uuid4().hex}"
        self._is_cancelled = False
        self._thread = InheritableThread(target=self._run, name=name, daemon=True)
        self.start = self._thread.start
        self.join = self._thread.join
        self.is_alive = self._thread.is_alive

    def cancel(self) -> None:
        """Have Spark end the task, and with it the agent."""
        self._is_cancelled = True
        self._spark.cancelJobGroup(self._group)

    def _run(self) -> None:
        self._spark.setJobGroup(self._group, self._name, interruptOnCancel=True)
        if self._is_cancelled:
            return
        try:
            for ended, records in self._spark.parallelize([0], 1).mapPartitions(self._body).collect():
                self.ended = f"its agent ended with {ended}"
                self.records += records
        except Exception as exc:  # of Py4J, as long as Spark's own text
            lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
            why = next((line for line in lines if "failure" in line or "cancelled" in line), lines[0] if lines else "")
            self.ended = f"Spark could not run its agent: {why}"


@dataclass(frozen=True)
class _Body:
    """The work of a task, for `mapPartitions`."""

    order: bytes = field(repr=False)
    call: bytes = field(repr=False)

    def __call__(self, _: Iterator[Any]) -> Iterator[tuple[str, list[Record]]]:
        task = TaskContext.get()
        # Spark runs a task again whose executor is lost. The launcher has a new order for that.
        if task is None or task.attemptNumber() == 0:
            yield run_agent(self.order, self.call)
