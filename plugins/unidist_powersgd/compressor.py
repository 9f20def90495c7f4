"""The compressor `powersgd`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from unidist.buffer import HOST, DType
from unidist.errors import ConfigurationError
from unidist.gradients.compression import Bucket, BucketCompressor, GradientCompressor


@dataclass(frozen=True)
class PowerSGD(GradientCompressor):
    """Approximates the sum of the ranks' gradients of each matrix by one of low rank (Vogels et al. 2019).

    For an n x m matrix `rank * (n + m)` numbers are sent. The residual of the approximation is kept on each rank and
    added to its next gradient, so that nothing is lost, only delayed. For float32 and float64 gradients in host memory;
    vectors, small matrices and other types are sent uncompressed. A tensor of more dims is a matrix of its first dim by
    all others. Needs numpy.

    Args:
        rank: of the approximation; 1 to 4 are usual. More is closer, and more bytes.
        warmup: updates that are exchanged without compression first, while gradients change fastest.
    """

    name: ClassVar[str] = "powersgd"

    rank: int = 2
    warmup: int = 10

    @override
    def validate(self) -> None:
        if self.rank < 1:
            raise ConfigurationError(f"powersgd/rank={self.rank}: give a rank of at least 1")
        if self.warmup < 0:
            raise ConfigurationError(f"powersgd/warmup={self.warmup}: give a number of updates, 0 or more")

    @override
    def attach(self, bucket: Bucket) -> BucketCompressor | None:
        if bucket.memory.dtype not in (DType.FLOAT32, DType.FLOAT64):
            return None
        if bucket.memory.memory != HOST:
            raise ConfigurationError(
                f"powersgd compresses gradients in host memory, but {bucket.parameters[0].name!r} is in "
                f"{bucket.memory.memory} memory; use fp16 or bf16, or keep the model on the CPU"
            )
        from unidist_powersgd._bucket import PowerSGDBucket

        made = PowerSGDBucket(bucket, rank=self.rank, warmup=self.warmup)
        return made if made.num_matrices else None
