"""`distribute`, `DistributedOptimizer`, `TrainStep` and `shard` for JAX. May import every other folder."""
