"""tf.data's own service under Horovod's names: `compute_service`, and the program `compute_worker`."""
