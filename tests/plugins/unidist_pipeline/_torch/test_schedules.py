"""Our lists against those of torch.distributed.pipelining, which was written by others."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from unidist_pipeline.schedules.classic import gpipe, interleaved, one_forward_one_backward
from unidist_pipeline.schedules.dualpipe import dualpipev
from unidist_pipeline.schedules.model import COMPUTE, PipelineSize, Schedule
from unidist_pipeline.schedules.v_shape import zbv
from unidist_pipeline.schedules.zero_bubble import zb_h1

torch_schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")


class RecordingStage:
    """Stands for a stage of torch's: writes down what it is asked to compute, and sends nothing."""

    def __init__(self, index: int) -> None:
        self.stage_index = index
        self.computed: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.computed.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *_: object, **__: object) -> None:
        self.computed.append(f"{self.stage_index}B{microbatch}")

    def _no_operations(self, *_: object) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_operations

    def perform_reduce_grad(self, *_: object) -> None:
        self.computed.append(f"{self.stage_index}REDUCE_GRAD")


def run_by_torch(schedule_class: Any, rank: int, size: PipelineSize) -> list[str]:
    """Return what torch's schedule of one stage on each rank has its stage do."""
    stage = RecordingStage(rank)
    runner: Any = object.__new__(schedule_class)
    runner._stage, runner._num_stages, runner._n_microbatches = stage, size.num_ranks, size.num_microbatches
    runner.scale_grads = False
    nothing = [()] * size.num_microbatches
    runner._check_inputs = lambda *_: (nothing, nothing)
    runner._initialize_stage = runner._maybe_compute_loss = runner._update_losses = lambda *_, **__: None
    runner._maybe_get_loss = lambda *_: None
    runner._step_microbatches()
    return stage.computed


def listed_by_torch(schedule_class: Any, rank: int, size: PipelineSize, **attributes: object) -> list[str]:
    """Return the list that torch computes for a rank with several stages."""
    maker: Any = object.__new__(schedule_class)
    rounds = max(1, size.num_microbatches // size.num_ranks)
    vars(maker).update(
        pp_group_size=size.num_ranks,
        n_local_stages=size.stages_per_rank,
        _n_microbatches=size.num_microbatches,
        number_of_rounds=rounds,
        microbatches_per_round=size.num_microbatches // rounds,
        num_stages=size.num_stages,
        _num_stages=size.num_stages,
        _stages=range(size.stages_per_rank),
        **attributes,
    )
    listed = [action for action in maker._calculate_single_rank_operations(rank) if action is not None]
    return [str(each) for action in listed for each in action.sub_actions or (action,)]  # a pair in its order


def ours(schedule: Schedule, rank: int, *kinds: str) -> list[str]:
    return [str(a) for a in schedule.ranks[rank] if a.kind in COMPUTE or a.kind.value in kinds]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 5), (4, 3), (4, 8), (5, 9)])
def test_gpipe_and_1f1b_compute_in_the_order_of_torchs(p: int, m: int) -> None:
    size = PipelineSize(p, m)
    for function, name in ((gpipe, "ScheduleGPipe"), (one_forward_one_backward, "Schedule1F1B")):
        schedule = function(size)
        for rank in range(p):
            theirs = run_by_torch(getattr(torch_schedules, name), rank, size)
            assert ours(schedule, rank, "REDUCE_GRAD") == theirs


@pytest.mark.parametrize(
    ("p", "m", "v"), [(2, 2, 2), (2, 4, 3), (4, 3, 2), (4, 8, 2), (4, 10, 2), (4, 7, 2), (4, 12, 4)]
)
def test_interleaved_is_torchs(p: int, m: int, v: int) -> None:
    size = PipelineSize(p, m, v)
    schedule = interleaved(size)
    for rank in range(p):
        assert ours(schedule, rank) == listed_by_torch(torch_schedules.ScheduleInterleaved1F1B, rank, size)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 2), (2, 5), (4, 1), (4, 6), (4, 8), (5, 12)])
def test_zbv_is_torchs(p: int, m: int) -> None:
    size = PipelineSize(p, m, 2)
    schedule = zbv(size)
    for rank in range(p):
        assert ours(schedule, rank) == listed_by_torch(torch_schedules.ScheduleZBVZeroBubble, rank, size)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (4, 8), (4, 13), (5, 12), (8, 20)])
def test_dualpipev_is_torchs(p: int, m: int) -> None:
    size = PipelineSize(p, m, 2)
    schedule = dualpipev(size)
    for rank in range(p):
        assert ours(schedule, rank) == listed_by_torch(torch_schedules.ScheduleDualPipeV, rank, size)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 4), (4, 9), (5, 12)])
def test_zb_h1_is_torchs_interleaved_zero_bubble_with_one_stage(p: int, m: int) -> None:
    size = PipelineSize(p, m)
    schedule = zb_h1(size)
    for rank in range(p):
        if m % max(1, m // p):
            continue  # torch has it only for whole rounds
        assert ours(schedule, rank) == listed_by_torch(torch_schedules.ScheduleInterleavedZeroBubble, rank, size)


def test_messages_between_two_ranks_come_in_the_order_of_torchs() -> None:
    """Both put them after what makes them; torch finds the receiver's order by a run in lockstep, we by times."""
    size = PipelineSize(3, 7, 2)
    for schedule in (interleaved(size), zbv(size), dualpipev(size)):
        theirs = torch_schedules._add_send_recv(
            {
                rank: [torch_schedules._Action.from_str(str(action)) for action in actions]
                for rank, actions in enumerate(schedule.compute())
            },
            stage_to_rank=lambda stage: schedule.placement[stage],  # noqa: B023
            num_stages=size.num_stages,
        )
        for rank, actions in enumerate(schedule.ranks):
            mine, other = defaultdict(list), defaultdict(list)
            for action in actions:
                if action.peer is not None:
                    mine[action.kind.value[:4], action.peer].append(str(action))
            for action in theirs[rank]:
                kind = action.computation_type.value
                if "_F" in kind or "_B" in kind:
                    towards = 1 if kind in ("SEND_F", "RECV_B") else -1
                    other[kind[:4], schedule.placement[action.stage_index + towards]].append(str(action))
            assert mine == other
