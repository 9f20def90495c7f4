"""`unidist launch --data-workers` with JAX, and how long loops wait for their batches."""

from __future__ import annotations

import json

import pytest
from unidist_command import Command

pytest.importorskip("jax")
pytestmark = pytest.mark.parallel

_SCRIPT = """
    import json, pathlib
    import numpy as np
    import jax
    import unidist.jax as ud
    from unidist.runtime import context

    def batches(shard):
        for number in range(shard.index, 8, shard.count):
            time.sleep(0.02)
            yield np.full((2, 3), number, np.float32), {"y": np.int32(number)}

    class Slow(list):
        def __iter__(self):
            for item in super().__iter__():
                time.sleep(0.02)
                yield item

    ud.init()
    served = ud.data_service(batches)
    found = [[int(jax.numpy.asarray(x)[0, 0]) for x, y in served] for _ in range(2)]
    recorder = context.current().recorder
    before = recorder.all_data_sec
    assert len(list(ud.shard(iter(Slow(range(8)))))) == 4
    waited = recorder.all_data_sec - before
    assert 0.15 < waited, waited
    before = recorder.all_data_sec
    assert len(list(ud.shard((np.zeros((16, 2)), np.zeros(16)), batch_size=2))) == 4
    assert recorder.all_data_sec > before
    pathlib.Path(f"found-{rank}").write_text(json.dumps(found))
"""


def test_batches_of_workers_and_the_wait_for_batches(command: Command) -> None:
    done = command.run("launch", "-np", "2", "--data-workers", "2", command.script(_SCRIPT))
    assert done.returncode == 0, done.stderr
    first, second = [json.loads((command.folder / f"found-{rank}").read_text()) for rank in range(2)]
    assert first == [[0, 1, 4, 5]] * 2
    assert second == [[2, 3, 6, 7]] * 2
