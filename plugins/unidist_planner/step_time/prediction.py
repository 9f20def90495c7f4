"""From what a rank does to seconds: one step of training, by what takes the time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from unidist.cost_model.cluster import Group
from unidist.cost_model.figures import Workload
from unidist.cost_model.memory import RankMemory
from unidist.cost_model.step import Exchange, Moment, RankStep
from unidist.cost_model.step_interface import PredictsStepTime, SearchProblem
from unidist.cost_model.work import PieceWork
from unidist.errors import ConfigurationError
from unidist.mesh import REPLICA_AXES, SAMPLE_AXES, SHARD_REPLICA_AXES
from unidist.strategy.interface import Plan
from unidist_planner.memory.estimate import Estimate, in_bytes, rank_memory

BACKWARD_FORWARDS = 2
"""A backward pass takes as long as this many forward passes: one for the inputs, one for the weights."""


@dataclass(frozen=True)
class TimePart:
    """A part of a step's time.

    Args:
        name: for tables.
        seconds: that the step becomes longer by it.
        detail: figures behind it.
        is_useful: it is the model's own arithmetic.
    """

    name: str
    seconds: float
    detail: str = ""
    is_useful: bool = False


@dataclass(frozen=True)
class Prediction:
    """One step of training with a plan.

    Args:
        line: the strategy line; "" is plain data parallelism.
        axes: sizes of the mesh, by axis, outermost first.
        samples: of one piece on one rank.
        num_pieces: pieces that a rank computes one after the other.
        parts: what the time consists of.
        estimate: what a rank holds.
        flops: floating-point operations in a second of one rank, on average: those of the model, recomputation not
            counted.
        exchanging: seconds of all exchanges, also of those behind arithmetic.
    """

    line: str
    axes: dict[str, int]
    samples: int
    num_pieces: int
    parts: tuple[TimePart, ...]
    estimate: Estimate
    flops: float
    exchanging: float

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return sum(part.seconds for part in self.parts)


def predict(line: str, plan: Plan, problem: SearchProblem) -> Prediction:
    """Return how long a step takes with a plan. Pure.

    Args:
        line: how the plan is called in the result.
        plan: checked; strategies without the capability `PredictsStepTime` change nothing.
        problem: model, machines, plugins.

    Raises:
        ConfigurationError: the batch does not divide over the replicas and pieces, or a strategy says no.
    """
    return outline(line, plan, problem).finished()


def step_of(plan: Plan, problem: SearchProblem) -> RankStep:
    """Return what one rank does in a step of the plan."""
    step = RankStep()
    for strategy in plan.strategies:
        if isinstance(strategy, PredictsStepTime):
            step = strategy.predict(step, plan, problem)
    return step


def outline(line: str, plan: Plan, problem: SearchProblem) -> Outline:
    """Return everything but the order of the pieces, which may take long to play through; see `predict`."""
    step = step_of(plan, problem)
    replicas = plan.mesh.size(SAMPLE_AXES)
    samples, rest = divmod(problem.work.batch, replicas * step.num_pieces)
    if rest or not samples:
        raise ConfigurationError(
            f"a batch of {problem.work.batch} samples does not divide over {replicas} replicas with "
            f"{step.num_pieces} pieces each: {replicas} * {step.num_pieces} = {replicas * step.num_pieces}. "
            "Use another batch, or another number of micro-batches."
        )
    workload = problem.work.workload(samples * step.num_pieces // step.passes)
    return Outline(line, plan, problem, step, samples, workload, rank_memory(workload, plan))


@dataclass(slots=True)
class _Timed:
    """The operations of an exchange, and how long all of them take.

    Args:
        item: the exchange.
        moment: when, which may be another moment for what is repeated.
        num_bytes: of one operation.
        times: number of operations.
        group: of the ranks that take part.
        seconds: of all operations.
        tail: of these, what cannot go on behind arithmetic.
        hidden: what does.
    """

    item: Exchange
    moment: Moment
    num_bytes: float
    times: float
    group: Group
    seconds: float
    tail: float
    hidden: float = 0.0

    @property
    def exposed(self) -> float:
        """The seconds by which its moment becomes longer."""
        return self.seconds - self.hidden

    @property
    def detail(self) -> str:
        """Words for people."""
        often = f"{self.times:g} x " if self.times != 1 else ""
        said = f"{self.item.operation} of {often}{_size(self.num_bytes)} over {_described(self.group)}"
        if self.item.servers:
            said += f" and {self.item.servers} servers"
        return f"{said}, {self.hidden:.2g} of {self.seconds:.2g} s behind arithmetic" if self.hidden else said


@dataclass
class Outline:
    """A step, but for the idle time of a pipeline: `at_least` is quick, `finished` may simulate a schedule."""

    line: str
    plan: Plan
    problem: SearchProblem
    step: RankStep
    samples: int
    workload: Workload
    memory: RankMemory
    estimate: Estimate = field(init=False)

    def __post_init__(self) -> None:
        """Do the arithmetic."""
        cluster, step, memory = self.problem.cluster, self.step, self.memory
        self._groups: dict[str, Group] = {}
        self.estimate = in_bytes(memory, self.workload)
        self._piece = self.problem.work.forward(self.samples, memory.activations.itemsize)
        recomputes = memory.activations.policy == "recompute"
        self._products = (self._piece.blocks + self._piece.outside) * step.share / cluster.flops
        self._slower = self._less_than_full_speed()
        self._traffic = self._streamed(self._piece.traffic * step.traffic)
        self._unevenly = (self._products + self._slower) * (step.uneven - 1)
        again = self._piece.blocks * step.share / cluster.flops + self._slower + self._traffic
        self._again = again if recomputes else 0.0
        plain = self._products + self._slower + self._unevenly + self._traffic
        self._computing: dict[Moment, float] = {"forward": plain, "backward": BACKWARD_FORWARDS * plain + self._again}
        self._timed = list(self._exchanges(repeated="forward" if recomputes else None))
        self._forward, self._backward = (
            self._computing[moment] + sum(item.exposed for item in self._timed if item.moment == moment)
            for moment in ("forward", "backward")
        )
        self._after = sum(item.exposed for item in self._timed if item.moment == "update") + self._updating()

    def _less_than_full_speed(self) -> float:
        """Return the seconds by which a forward pass takes longer than its operations at the rate of large products.

        It may be below 0: what a kernel leaves out of attention counts among the operations.
        """
        cluster, piece, step = self.problem.cluster, self._piece, self.step
        rate = cluster.attention_flops or cluster.flops
        attention = (piece.attention - piece.skipped) / rate - piece.attention / cluster.flops
        return attention * step.share + cluster.product_overhead * piece.products * step.blocks

    @property
    def exchanging(self) -> float:
        """Seconds of all exchanges of a step, also of those behind arithmetic."""
        return sum(item.seconds * (1 if item.moment == "update" else self.step.num_pieces) for item in self._timed)

    @property
    def at_least(self) -> float:
        """A lower bound of the step's time."""
        step = self.step
        pieces = step.num_pieces // step.passes
        return step.passes * step.order.at_least(pieces, self._forward, self._backward) + self._after

    def finished(self) -> Prediction:
        """Return the prediction."""
        step, plan, num = self.step, self.plan, self.step.num_pieces
        message = self._message()
        passes = step.order.seconds(num // step.passes, self._forward, self._backward, message)
        idle = max(0.0, step.passes * passes - num * (self._forward + self._backward))
        parts = [
            TimePart("arithmetic", num * (1 + BACKWARD_FORWARDS) * self._products, is_useful=True),
            TimePart(
                "small products", num * (1 + BACKWARD_FORWARDS) * self._slower, "attention, and starting each product"
            ),
            TimePart("memory traffic", num * (1 + BACKWARD_FORWARDS) * self._traffic, "of what is no matrix product"),
            TimePart("recomputation", num * self._again),
            TimePart(
                "uneven stages", num * (1 + BACKWARD_FORWARDS) * self._unevenly, f"{step.uneven:.2f} of the average"
            ),
        ]
        for item in self._timed:
            times = 1 if item.moment == "update" else num
            parts.append(TimePart(item.item.name, item.exposed * times, item.detail))
        stages = plan.mesh.size(step.order.axis) if step.order.axis else 1
        parts.append(TimePart("idle", idle, f"{num // step.passes} micro-batches on {stages} ranks of a pipeline"))
        parts.append(TimePart("update", self._updating(), "reading and writing the optimizer's state"))
        kept = tuple(part for part in _merged(parts) if part.seconds)
        seconds = sum(part.seconds for part in kept)
        return Prediction(
            self.line,
            dict(plan.mesh.axes),
            samples=self.samples,
            num_pieces=num,
            parts=kept,
            estimate=self.estimate,
            flops=num * (1 + BACKWARD_FORWARDS) * (self._piece.blocks + self._piece.outside) * step.share / seconds,
            exchanging=self.exchanging,
        )

    def _exchanges(self, *, repeated: Moment | None) -> Iterator[_Timed]:
        """Yield all exchanges. A rank that computes the passes of `repeated` again repeats their exchanges backward."""
        left = dict(self._computing)
        overlap = self.problem.cluster.overlap
        # Gradients are exchanged while the last piece's backward pass runs, in the time that its own exchanges leave.
        for item in sorted(self.step.exchanges, key=lambda item: item.moment == "update"):
            if item.moment == "update" and "update" not in left:
                left["update"] = left["backward"]
            timed = self._timing(item)
            if timed is None:
                continue
            if repeated == item.moment and item.moved in ("border", "keys"):
                yield replace(timed, moment="backward")
            if item.beside:
                most = min(timed.seconds * overlap * item.gained, timed.seconds - timed.tail)
                timed.hidden = min(most, left[item.moment])
                left[item.moment] -= timed.hidden
            yield timed

    def _timing(self, item: Exchange) -> _Timed | None:
        """Return how long all operations of an exchange take; None if it takes no time."""
        group = self._group(item.axis)
        if group.size < 2:
            return None
        cluster, model, share = self.problem.cluster, self.workload.model, self.step.parameters
        units = self.problem.work.num_blocks * self.step.blocks
        if item.moved in ("border", "keys"):
            elements = self._piece.border if item.moved == "border" else self._piece.keys
            num_bytes = elements * self.step.tokens * self.memory.activations.itemsize
            times = item.count * units
        elif item.moved == "gradients":
            num_bytes, times = model.num_trained * share * self.memory.gradients.bytes_each, item.count
        else:
            num_bytes, times = model.parameters * share * self.memory.parameters.bytes_each, item.count
        num_bytes *= item.scale
        if item.by_block:
            num_bytes, times = num_bytes / units / item.count, item.count * units
        seconds = cluster.seconds(item.operation, num_bytes, group, servers=item.servers)
        if item.axis == REPLICA_AXES and self.step.experts:
            part, fewer = self.step.experts, self._group(SHARD_REPLICA_AXES)
            seconds = cluster.seconds(item.operation, num_bytes * (1 - part), group)
            seconds += cluster.seconds(item.operation, num_bytes * part, fewer) if fewer.size > 1 else 0.0
        if not seconds:
            return None
        tail = 0.0
        if item.tail_bytes:
            least = min(num_bytes, item.tail_bytes)
            tail = cluster.seconds(item.operation, least, group, servers=item.servers)
        return _Timed(item, item.moment, num_bytes, times, group, times * seconds, min(tail, seconds))

    def _group(self, axis: str) -> Group:
        """Return how the ranks along an axis lie on the hosts."""
        found = self._groups.get(axis)
        if found is None:
            found = self._groups[axis] = self.problem.cluster.group(self.plan.mesh, axis)
        return found

    def _border(self, piece: PieceWork) -> float:
        return piece.border * self.step.tokens * self.memory.activations.itemsize

    def _message(self) -> float:
        axis = self.step.order.axis
        if not axis:
            return 0.0
        cluster = self.problem.cluster
        passed = self._border(self._piece) * self.step.passed
        return cluster.seconds("sendrecv", passed, self._group(axis))

    def _updating(self) -> float:
        """Return the seconds in which the optimizer reads and writes what it updates."""
        memory, model = self.memory, self.workload.model
        each = 2 * (memory.optimizer.bytes_each + memory.master.bytes_each + memory.parameters.bytes_each)
        return self._streamed(model.num_trained * memory.optimizer.share * (each + memory.gradients.bytes_each))

    def _streamed(self, num_bytes: float) -> float:
        bandwidth = self.problem.cluster.memory_bandwidth
        return 0.0 if bandwidth is None else num_bytes / bandwidth


def _merged(parts: list[TimePart]) -> list[TimePart]:
    """Return the parts with those of one name added up, in the order of their first ones."""
    found: dict[str, TimePart] = {}
    for part in parts:
        old = found.get(part.name)
        if old is None:
            found[part.name] = part
        else:
            found[part.name] = TimePart(part.name, old.seconds + part.seconds, old.detail, old.is_useful)
    return list(found.values())


def _size(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"


def _described(group: Group) -> str:
    where = "one host" if group.hosts == 1 else f"{group.hosts} hosts"
    return f"{group.size} ranks of {where}"
