"""The trivial compressor: gradients travel as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from unidist.gradients.compression import Bucket, BucketCompressor, GradientCompressor


@dataclass(frozen=True)
class NoCompression(GradientCompressor):
    """Compresses nothing; for switching off a compression that the command line asks for."""

    name: ClassVar[str] = "none"

    @override
    def attach(self, bucket: Bucket) -> BucketCompressor | None:
        return None
