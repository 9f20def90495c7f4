"""A push to the store of `parameter_server` beside an all-reduce, and steps of two GPTs beside `data`.

Run by `python -m benchmarks`, which starts it on two ranks with one of `PARTS`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

import unidist.torch as ud
from benchmarks.gloo_meeting import gloo_meeting
from benchmarks.jobs import ROOT
from unidist.buffer import HOST, DType
from unidist.gradients import ParameterInfo
from unidist.mesh import DATA_AXIS
from unidist.runtime.context import current
from unidist_bench import BenchmarkRanks, side_by_side
from unidist_parameter_server.optimizers import Adam, Momentum, Rule
from unidist_parameter_server.strategy import ParameterServer
from unidist_parameter_server.workers import PushExchange, Worker
from unidist_torch.framework import TorchFramework

COUNTS = (2_375_000, 2_375_000, 1_187_500, 1_187_500, 2_375_000)
"""Elements of the parameters: 38 MB in float32."""
RULES: dict[str, Rule] = {"SGD": Momentum(1e-4), "AdamW": Adam(1e-4, weight_decay=0.01, decoupled=True)}
OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, fused=True),
}
LINES = ("data", "parameter_server=async", "parameter_server=sync")
"""The strategies whose steps are compared."""
STEPS, LARGE_STEPS = 8, 3
"""Steps of a turn: nobody waits for the others within it, except as the strategy says."""


def push_and_fetch(mode: str, rule: Rule) -> Callable[[], None]:
    """Return a function that pushes 38 MB of gradients, and fetches as much. Collective."""
    context = current()
    strategy = ParameterServer("sync" if mode == "sync" else "async")
    parameters = [ParameterInfo(str(index), (count,), DType.FLOAT32, HOST) for index, count in enumerate(COUNTS)]
    exchange = PushExchange(
        parameters,
        TorchFramework(),
        ud.size(),
        is_mean=strategy.is_together,
        is_local=strategy.steps_alone,
        communicator=context.new_communicator(DATA_AXIS),
    )
    for _, gradient in exchange.memories():
        gradient[:] = np.random.default_rng(ud.rank()).standard_normal(len(gradient), np.float32)
    slots = () if isinstance(rule, Momentum) else rule.slots
    worker = Worker(strategy.worker_options(), exchange, context.new_communicator(DATA_AXIS), context, slots)
    worker.set_targets([np.zeros(count, np.float32) for count in COUNTS])
    worker.fill(lambda parameter, slot: None, [0] * len(COUNTS), [0.0] * len(COUNTS))
    rules, present = [rule] * len(COUNTS), [True] * len(COUNTS)
    return lambda: worker.step(rules, present)


def allreduce_and_step(name: str) -> Callable[[], object]:
    """Return a function that reduces 38 MB of gradients in engine memory, and steps by them."""
    gradients = ud.empty(sum(COUNTS))
    parameters = [torch.nn.Parameter(torch.zeros(count)) for count in COUNTS]
    for parameter, gradient in zip(parameters, gradients.split(COUNTS), strict=True):
        parameter.grad = gradient
    optimizer = OPTIMIZERS[name](parameters)

    def step() -> None:
        ud.allreduce_(gradients, name=f"gradients, {name}")
        optimizer.step()

    return step


def measure_store(meeting: BenchmarkRanks, repetitions: int) -> dict[str, float]:
    """Return the medians of all that is measured with 38 MB, in seconds."""
    alone = ud.empty(sum(COUNTS))
    variants: dict[str, Callable[[], object]] = {"all-reduce": lambda: ud.allreduce_(alone, name="alone")}
    for name, rule in RULES.items():
        variants[f"all-reduce and {name}"] = allreduce_and_step(name)
        for mode in ("async", "sync"):
            variants[f"{mode}, {name}"] = push_and_fetch(mode, rule)
    return side_by_side(variants, meeting, repetitions=repetitions)


def char_gpt_step(line: str) -> Callable[[], None]:
    """Return a step of the character GPT of the examples, as that makes it by default."""
    sys.path.insert(0, str(ROOT / "examples" / "torch"))
    import char_gpt

    text = char_gpt.Text(40)
    torch.manual_seed(0)
    model: torch.nn.Module = char_gpt.GPT(len(text.alphabet), 128, 4, 128, 4)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    step = ud.TrainStep(model, optimizer, char_gpt.next_character_loss, line)
    generator = torch.Generator().manual_seed(1 + ud.rank())
    return lambda: step(*char_gpt.draw(text.train, 16, 128, generator))


def large_gpt_step(line: str) -> Callable[[], None]:
    """Return a step of the GPT of 17 million parameters."""
    from benchmarks.gpt_step import make_step

    return make_step(lambda model, optimizer: ud.distribute(model, optimizer, line))


def measure_gpt(meeting: BenchmarkRanks, repetitions: int) -> dict[str, float]:
    """Return the medians of a step of each GPT with each strategy, in seconds."""
    small = {f"char GPT, {line}": char_gpt_step(line) for line in LINES}
    large = {f"GPT, {line}": large_gpt_step(line) for line in LINES}
    return {
        **side_by_side(small, meeting, repetitions=repetitions, warmup=1, inner=STEPS),
        **side_by_side(large, meeting, repetitions=repetitions, warmup=1, inner=LARGE_STEPS),
    }


PARTS = {"store": measure_store, "gpt": measure_gpt}


def main(output: str, repetitions: int, part: str) -> None:
    """Measure one of `PARTS`, and let rank 0 write the medians (seconds) to `output`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ud.init()
    found = PARTS[part](gloo_meeting(), repetitions)
    if ud.rank() == 0:
        with open(output, "w") as file:
            json.dump(found, file)
    ud.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
