"""Sizes and schedules that several tests of this folder go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from unidist_pipeline.schedules.classic import gpipe, interleaved, one_forward_one_backward
from unidist_pipeline.schedules.dualpipe import dualpipev
from unidist_pipeline.schedules.model import PipelineSize, Schedule
from unidist_pipeline.schedules.searched import zb_1p, zb_2p
from unidist_pipeline.schedules.v_shape import v_half, v_min, zbv
from unidist_pipeline.schedules.zero_bubble import zb_h1, zb_h2

SCHEDULES: dict[Callable[[PipelineSize], Schedule], tuple[int, ...]] = {
    gpipe: (1, 2, 3),
    one_forward_one_backward: (1,),
    interleaved: (2, 3),
    zb_h1: (1,),
    zb_h2: (1,),
    zb_1p: (1,),
    zb_2p: (1,),
    zbv: (2,),
    dualpipev: (2,),
    v_half: (2,),
    v_min: (2,),
}
"""Every schedule of the plugin, with numbers of stages that a rank can have."""


def all_schedules(ranks: tuple[int, ...], microbatches: tuple[int, ...]) -> Iterator[Schedule]:
    """Yield every schedule for every combination of these sizes."""
    for function, stages in SCHEDULES.items():
        for stages_per_rank in stages:
            for num_ranks in ranks:
                for num_microbatches in microbatches:
                    yield function(PipelineSize(num_ranks, num_microbatches, stages_per_rank))
