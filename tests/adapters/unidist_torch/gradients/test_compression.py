"""What may be passed as `compression=`, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unidist.buffer import DType
from unidist.builtin.half import BFloat16, Float16
from unidist.builtin.uncompressed import NoCompression
from unidist.communicator import Communicator
from unidist.errors import ConfigurationError, UsageError
from unidist.gradients.buckets import BucketLayout, ParameterInfo, Slot
from unidist.gradients.compression import Bucket
from unidist.gradients.per_tensor import PerTensor
from unidist.runtime.plugin_manager import PluginManager
from unidist.testing import ThreadWorld
from unidist_powersgd.compressor import PowerSGD
from unidist_torch.framework import TorchFramework
from unidist_torch.gradients.compression import TorchTensors, compressor_of, tensor_compressor
from unidist_torch.memory import buffer_of
from unidist_torch.operations.compression import Compression


class Own(Compression.fp16):
    """Derived from one of ours, but not it: it may do anything."""


def per_tensor(compressor: Any) -> PerTensor:
    return PerTensor(compressor, TorchTensors())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (Compression.none, None),
        (Compression.fp16, Float16()),
        (Compression.bf16, BFloat16()),
        ("none", NoCompression()),
        ("powersgd/rank=3", PowerSGD(rank=3)),
        (PowerSGD(rank=4), PowerSGD(rank=4)),
        (Own, per_tensor(Own)),
    ],
)
def test_names_objects_and_horovods_classes(given: Any, wanted: Any) -> None:
    assert compressor_of(given, PluginManager().load().compressors) == wanted


def test_what_does_not_fit_is_refused() -> None:
    registry = PluginManager().load().compressors
    with pytest.raises(ValueError, match="no compress and decompress"):
        compressor_of(int, registry)
    with pytest.raises(ConfigurationError, match="rank=0"):
        compressor_of(PowerSGD(rank=0), registry)
    with pytest.raises(UsageError, match="single tensors"):
        tensor_compressor("fp16")
    assert tensor_compressor(Own) is Own


def test_ranks_compare_a_users_compressor_by_its_class() -> None:
    assert repr(per_tensor(Own)) == repr(per_tensor(Own())) == f"PerTensor({__name__}.Own)"


class HalfOfIt:
    """Sends every other number only."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.flatten()[::2], tensor.shape

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.repeat_interleave(2).reshape(ctx)


def test_gradients_are_compressed_one_by_one_in_their_shapes() -> None:
    def main(communicator: Communicator) -> tuple[int, list[float]]:
        memory = torch.arange(12.0) * (1 + communicator.rank)
        parameters = (ParameterInfo("a", (2, 2), DType.FLOAT32), ParameterInfo("b", (6,), DType.FLOAT32))
        layout = BucketLayout(DType.FLOAT32, "host", (Slot(1, 0, 4), Slot(0, 6, 6)), 12)
        attached = per_tensor(HalfOfIt()).attach(
            Bucket(layout, parameters, buffer_of(memory), communicator, TorchFramework())
        )
        assert attached is not None
        attached.allreduce(0.5).wait()
        return attached.num_operations, memory.tolist()

    # The mean of once and twice; what lies between the gradients is left alone.
    wanted = [1.5 * value for value in (0, 0, 2, 2)], [1.5 * value for value in (6, 6, 8, 8, 10, 10)]
    with ThreadWorld(2) as world:
        for rank, (operations, found) in enumerate(world.run(main)):
            assert operations == 2
            assert found == [*wanted[0], 4.0 * (1 + rank), 5.0 * (1 + rank), *wanted[1]]
