"""Registers the strategies that have names of `tf.distribute`."""

from __future__ import annotations

from unidist import hookimpl
from unidist.registry import Registry
from unidist.strategy import StrategySpec

_SUMMARIES = {
    "one_device": ("OneDevice", "tf.distribute's OneDeviceStrategy: one process"),
    "mirrored": ("Mirrored", "tf.distribute's MirroredStrategy: `data`, on one host"),
    "multi_worker_mirrored": ("MultiWorkerMirrored", "tf.distribute's MultiWorkerMirroredStrategy: `data`"),
    "tpu": ("TPU", "tf.distribute's TPUStrategy: says what there is instead"),
}


@hookimpl
def unidist_register_strategies(registry: Registry[StrategySpec]) -> None:
    """Register all of them."""
    for name, (cls, summary) in _SUMMARIES.items():
        registry.add(StrategySpec(name, f"unidist_tf_distribute.strategies:{cls}", summary))
