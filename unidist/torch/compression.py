"""Compression of tensors around an operation, where Horovod has it: `unidist.torch.compression`."""

from unidist.horovod_api.compression import Compressor, NoneCompressor
from unidist_torch.operations.compression import BF16Compressor, Compression, FP16Compressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
