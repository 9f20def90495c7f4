"""tf.data's own service under Horovod's names: a compute job, and a training job that reads from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from unidist_command import Command

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.parallel

_TRAIN = """
    import json, pathlib
    import tensorflow as tf
    import horovod.tensorflow as hvd
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig

    hvd.init()
    config = TfDataServiceConfig.read("config", wait_for_file_creation=True)
    dataset = tf.data.Dataset.range(20).batch(2).send_to_data_service(
        config, hvd.rank(), hvd.size(), reuse_dataset=True
    )
    found = [int(number) for batch in dataset for number in batch]
    pathlib.Path(f"found-{rank}").write_text(json.dumps(found))
    hvd.allreduce(tf.constant(0.0))
    if rank == 0:
        config.compute_client().shutdown()
"""


def test_a_training_job_reads_from_a_compute_job(command: Command) -> None:
    module = "horovod.tensorflow.data.compute_worker"
    with command.start("launch", "-np", "2", "--as-horovod", "-m", module, "config", "--timeout", "100") as compute:
        done = command.run("launch", "-np", "2", "--as-horovod", command.script(_TRAIN))
        assert done.returncode == 0, done.stderr
        _, told = compute.communicate(timeout=60)
    assert compute.returncode == 0, told
    found = [json.loads((command.folder / f"found-{rank}").read_text()) for rank in range(2)]
    assert sorted(found[0] + found[1]) == list(range(20))


def test_a_configuration_is_read_as_it_was_written(tmp_path: Path) -> None:
    from unidist.tensorflow.data.compute_service import TfDataServiceConfig

    config = TfDataServiceConfig(2, 3, "training", {"any": [("host", 5)]}, b"\x00key", timeout=7)
    path = tmp_path / "config"
    config.write(str(path))
    assert TfDataServiceConfig.read(str(path)) == config
    assert path.stat().st_mode & 0o77 == 0
