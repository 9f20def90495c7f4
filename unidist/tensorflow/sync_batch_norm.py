"""Synchronised batch normalisation, where Horovod has it: `unidist.tensorflow.sync_batch_norm`."""

from unidist_tensorflow.keras.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "SyncBatchNormalization",
]  # fmt: skip
