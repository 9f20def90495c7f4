"""Published results, from their inputs alone: no number here is fitted to them.

The inputs are the sizes that the papers give and the figures that makers give for their machines (`A100`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_plugins import A100, predicted, problem

from unidist.cost_model.cluster import Cluster
from unidist.cost_model.collectives import Link
from unidist_planner.memory.transformer import Transformer
from unidist_planner.step_time.prediction import Prediction
from unidist_planner.step_time.transformer import TransformerWork

FREE = Cluster(flops=1e12, ranks_per_host=64, inside=Link(0, 1e18), between=Link(0, 1e18))
"""Messages take no time: only the bubble bounds a pipeline."""

# Narayanan et al. 2021 (arXiv:2104.04473), Table 1: heads, hidden size, layers, tensor, pipeline, GPUs, batch, and the
# TFLOP/s of one GPU.
TABLE_1 = [
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (32, 3072, 30, 2, 1, 64, 512, 138),
    (32, 4096, 36, 4, 1, 128, 512, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 138),
    (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148),
    (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 163),
]


def gpt(heads: int, hidden: int, layers: int, batch: int) -> TransformerWork:
    return TransformerWork(Transformer(layers, hidden, 51200, 2048, heads=heads), batch, precision="fp16")


def megatron(work: TransformerWork, gpus: int, tensor: int, pipeline: int, micro_batch: int = 1) -> Prediction:
    """Return the prediction of a run as the paper has them: 1F1B, every activation recomputed."""
    data = gpus // (tensor * pipeline)
    pieces = work.batch // (data * micro_batch)
    items = [f"tensor={tensor}" if tensor > 1 else ""]
    items += [f"pipeline={pipeline}:schedule=1f1b:microbatches={pieces}" if pipeline > 1 else f"accumulate={pieces}"]
    return predicted(",".join(filter(None, [*items, "activations=recompute"])), problem(work, gpus))


def teraflops(work: TransformerWork, gpus: int, found: Prediction) -> float:
    """Return what the paper counts for one GPU: operations of recomputation too (its equation 3)."""
    sample = work.forward(1, 2)
    return (4 * sample.blocks + 3 * sample.outside) * work.batch / (found.seconds * gpus) / 1e12


@pytest.fixture(scope="module")
def weak_scaling() -> list[float]:
    found = []
    for heads, hidden, layers, tensor, pipeline, gpus, batch, _ in TABLE_1:
        work, replicas = gpt(heads, hidden, layers, batch), gpus // (tensor * pipeline)
        sizes = [size for size in (1, 2, 4, 8) if batch % (replicas * size) == 0]  # the paper does not say which
        found.append(max(teraflops(work, gpus, megatron(work, gpus, tensor, pipeline, size)) for size in sizes))
    return found


def test_megatron_s_throughput_within_10_percent(weak_scaling: list[float]) -> None:
    """Table 1. The trillion parameters are 502 petaFLOP/s on 3072 GPUs (also in the abstract): 163 for each."""
    published = [row[-1] for row in TABLE_1]
    ratios = [ours / theirs for ours, theirs in zip(weak_scaling, published, strict=True)]
    assert all(0.9 < ratio < 1.1 for ratio in ratios), ratios
    assert pytest.approx(published[-1], rel=0.005) == 502 / 3.072


def test_megatron_s_utilisation_rises_with_the_size_of_the_model(weak_scaling: list[float]) -> None:
    """Table 1.

    From where a whole host divides each layer on, larger models use GPUs better, in spite of longer
    pipelines.
    """
    whole_hosts = weak_scaling[3:]
    assert whole_hosts[1:] == sorted(whole_hosts[1:])
    assert whole_hosts[-1] / whole_hosts[0] == pytest.approx(163 / 135, rel=0.15)
    # and it falls, as published, from 1 to 8 GPUs for each layer
    assert weak_scaling[3] == pytest.approx(min(weak_scaling), rel=0.01)


def test_tensor_parallelism_belongs_inside_of_a_host() -> None:
    """Section 5.4.1.

    Figure 13: 162.2 billion parameters on 64 GPUs. Tensor 8 and pipeline 8, as many as a host has
    GPUs, is best for both batches, and 32 far behind.
    """
    for batch in (32, 128):
        work = gpt(128, 20480, 32, batch)
        times = {tensor: megatron(work, 64, tensor, 64 // tensor).seconds for tensor in (2, 4, 8, 16, 32)}
        assert times[2] > times[4] > times[8] < times[16] < times[32], times
        assert times[32] > 1.4 * times[8]


@pytest.mark.parametrize("batch", [32, 128, 512])
def test_data_before_pipeline_where_the_model_fits(batch: int) -> None:
    """Section 5.4.2.

    Figure 14: 5.9 billion parameters on 64 GPUs. The longer the pipeline, the slower; least so for
    the largest batch.
    """
    work = gpt(32, 3840, 32, batch)
    times = [megatron(work, 64, 1, pipeline).seconds for pipeline in (2, 4, 8, 16, 32)]
    assert times == sorted(times)
    largest = gpt(32, 3840, 32, 4 * batch)
    relative = [megatron(largest, 64, 1, pipeline).seconds for pipeline in (2, 32)]
    assert relative[1] / relative[0] < times[-1] / times[0]


def test_data_before_tensor_where_the_model_fits() -> None:
    """Section 5.4.3, Figure 15: likewise for tensor parallelism; across hosts it falls steeply."""
    work = gpt(32, 3840, 32, 512)
    times = [megatron(work, 64, tensor, 1).seconds for tensor in (2, 4, 8, 16, 32)]
    assert times == sorted(times)
    assert times[3] / times[2] > times[1] / times[0]


def test_interleaving_gains_ten_percent_and_more() -> None:
    """Abstract and section 5.3.2, Figure 12: 175 billion parameters on 96 GPUs; the gain falls as the batch grows."""
    gains = []
    for batch in (12, 60):
        work = gpt(96, 12288, 96, batch)
        lines = [
            f"tensor=8,pipeline=12:schedule={name}:microbatches={batch},activations=recompute"
            for name in ("1f1b", "interleaved")
        ]
        plain, interleaved = (predicted(line, problem(work, 96)).seconds for line in lines)
        gains.append(plain / interleaved - 1)
    assert gains[0] > 0.10
    assert 0 < gains[1] < gains[0]


def bubble_bound(partitions: int, microbatches: int) -> float:
    """Return the speed-up over one accelerator with the schedule of GPipe, which recomputes."""
    work = TransformerWork(Transformer(48, 1024, 1, 128), batch=microbatches)
    alone = predicted("activations=recompute", problem(work, 1, cluster=FREE)).seconds
    line = f"pipeline={partitions}:schedule=gpipe:microbatches={microbatches},activations=recompute"
    return alone / predicted(line, problem(work, partitions, cluster=FREE)).seconds


@pytest.mark.parametrize(("partitions", "microbatches"), [(2, 1), (4, 4), (4, 32), (8, 8), (8, 32), (16, 64)])
def test_gpipe_s_speed_up_is_bounded_by_its_bubble(partitions: int, microbatches: int) -> None:
    """Huang et al. 2019 (arXiv:1811.06965), section 2.3: the bubble is (K-1)/(M+K-1), so the speed-up K M/(M+K-1)."""
    expected = partitions * microbatches / (microbatches + partitions - 1)
    assert bubble_bound(partitions, microbatches) == pytest.approx(expected, rel=1e-4)  # a head of one word counts too


def test_gpipe_s_measured_speed_ups_come_near_the_bound() -> None:
    """Same paper.

    Table 2, Transformer, M = 32: 1.8, 3.4 and 6.3 on 2, 4 and 8 accelerators. Table 3, GPUs without fast
    links, relative to 2 of them: 1.8 and 3.3 on 4 and 8.
    """
    bounds = {partitions: bubble_bound(partitions, 32) for partitions in (2, 4, 8)}
    for partitions, measured in ((2, 1.8), (4, 3.4), (8, 6.3)):
        assert 0.9 < measured / bounds[partitions] <= 1.0
    for partitions, measured in ((4, 1.8), (8, 3.3)):
        assert 0.94 < measured / (bounds[partitions] / bounds[2]) <= 1.0


def test_more_microbatches_than_four_times_the_stages_leave_little_idle() -> None:
    """Section 2.3 of GPipe: with M >= 4 K the overhead of the bubble is almost negligible: below a fifth, here."""
    for partitions in (2, 4, 8):
        assert bubble_bound(partitions, 4 * partitions) / partitions > 0.8
        assert bubble_bound(partitions, partitions) / partitions < 0.7


def test_zero_3_pays_for_small_batches_on_each_gpu() -> None:
    """Narayanan et al., section 5.2.

    Figure 10: with a fixed batch, twice the GPUs hurt ZeRO-3 more than pipelines and
    tensors, because its traffic stays the same while there is less arithmetic to hide it behind.
    """
    work = gpt(96, 12288, 96, 1536)
    half = replace(A100, overlap=0.5)
    times = {}
    for gpus in (384, 1536):
        divided = predicted(
            f"tensor=8,pipeline=12:schedule=1f1b:microbatches={1536 // (gpus // 96)},activations=recompute",
            problem(work, gpus, cluster=half),
        ).seconds
        sharded = predicted("zero=3,activations=recompute", problem(work, gpus, cluster=half)).seconds
        times[gpus] = (divided, sharded)
    growth = [times[384][i] / times[1536][i] for i in range(2)]
    assert growth[0] > growth[1]
