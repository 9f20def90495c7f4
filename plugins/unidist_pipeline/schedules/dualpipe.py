"""DualPipeV: two stages on each rank, in a V, with forward and backward of two micro-batches in pairs.

From DeepSeek's DualPipe (https://github.com/deepseek-ai/DualPipe, `dualpipe/dualpipev.py`; DeepSeek-V3 technical
report, arXiv:2412.19437, section 3.2.1), as `torch.distributed.pipelining.schedules.ScheduleDualPipeV` lists it. A pair
is a forward of one stage of a rank and a backward of its other stage. They do not depend on each other, so the messages
of one travel while the other is computed. The executor does not wait at messages: it computes the forward, begins to
send the result, and computes the backward.

Backwards are in one piece, except those that fill gaps: before the pairs, and at the end. With PP = 2p stages, the
published idle time is (PP/2-1)(F&B+B-3W), where B is a full backward and F&B the time of a pair whose results leave at
its end. Here the result of the forward leaves before the backward begins. With F = W and B = 2W, that halves the idle
time of a rank: p-1 instead of 2(p-1) forwards. A rank holds PP+1 activations of a stage.
"""

from __future__ import annotations

from collections import deque

from unidist_pipeline.schedules.builder import complete
from unidist_pipeline.schedules.model import Action, PipelineSize, Schedule, v_shaped
from unidist_pipeline.schedules.v_shape import StageActions, require_two_stages


def dualpipev(size: PipelineSize) -> Schedule:
    """Forwards and backwards in pairs, each on one of a rank's two stages (DualPipeV).

    From 2p micro-batches on, as published; with fewer, it is the schedule for 2p without the missing ones.

    Raises:
        ConfigurationError: another number than two stages on each rank.
    """
    require_two_stages(size, "dualpipev")
    compute = [
        [action for action in _rank(rank, size) if (action.microbatch or 0) < size.num_microbatches]
        for rank in range(size.num_ranks)
    ]
    return complete("dualpipev", size, v_shaped(size), compute)


def _rank(rank: int, size: PipelineSize) -> list[Action]:
    """Return the computing actions of a rank, in the eight phases of the source."""
    near, far = StageActions(rank), StageActions(size.num_stages - 1 - rank)
    after = size.num_ranks - 1 - rank  # ranks between this one and the turn of the V
    num_microbatches = max(size.num_stages, size.num_microbatches)
    late: deque[Action] = deque()  # gradients of weights that are still to be computed

    def backward_input(stage: StageActions) -> Action:
        late.append(stage.backward_weight())
        return stage.backward_input()

    actions = [near.forward() for _ in range(2 * after)]
    for _ in range(rank + 1):
        actions += [near.forward(), far.forward()]
    for _ in range(after):
        actions += [backward_input(far), late.popleft(), far.forward()]
    for _ in range(num_microbatches - size.num_stages + rank + 1):
        actions += [near.forward(), far.backward(), far.forward(), near.backward()]
    for _ in range(after):
        actions += [far.backward(), far.forward(), near.backward()]
    # Every rank computes rank + 1 backwards of each stage; in the second half only what other ranks wait for.
    for index in range(2 * (rank + 1)):
        stage = near if index % 2 else far
        actions.append(backward_input(stage) if index > rank else stage.backward())
    for _ in range(after):
        actions += [late.popleft(), backward_input(near)]
    return actions + list(late)
