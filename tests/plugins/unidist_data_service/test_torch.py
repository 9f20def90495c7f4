"""`unidist launch --data-workers` with PyTorch: batches are those of the loader, and steps do not wait for them."""

from __future__ import annotations

import json

import pytest
from unidist_command import Command

pytest.importorskip("torch")
pytestmark = pytest.mark.parallel

_DATA = """
    import json, pathlib
    import torch
    from torch.utils.data import DataLoader, Dataset
    import unidist.torch as ud
    from unidist.runtime import context

    class Slow(Dataset):
        def __init__(self, seconds=0.005):
            self.seconds = seconds

        def __len__(self):
            return 50

        def __getitem__(self, index):
            time.sleep(self.seconds)
            if index == 49 and self.seconds == 0:
                raise KeyError("sample 49 is broken")
            return {"x": torch.full((3, 8), float(index), dtype=torch.bfloat16), "y": index, "noise": torch.rand(2)}

    def loader(dataset):
        return ud.shard(DataLoader(dataset, batch_size=4, shuffle=True))

    def equal(found, wanted):
        assert len(found) == len(wanted), (len(found), len(wanted))
        for one, other in zip(found, wanted):
            assert one.keys() == other.keys()
            assert one["x"].dtype == torch.bfloat16
            assert all(torch.equal(one[name], other[name]) for name in ("x", "y")), (one, other)

    ud.init()
    recorder = context.current().recorder
"""
_EQUAL = """
    slow = Slow()
    plain, served, same = loader(slow), ud.data_service(loader(slow)), ud.data_service(loader(slow))
    assert len(served) == len(plain) == 7
    for _ in range(2):
        found = list(served)
        equal(found, list(plain))
        assert all(torch.equal(one["noise"], other["noise"]) for one, other in zip(found, same))
    assert all(link.uses_memory for link in served._batches.workers.links.values())
    for batch in served:
        break  # what was asked for is dropped
    equal(list(served), [list(plain), list(plain)][1])
    before, after = ud.data_service(loader(slow)), ud.data_service(loader(slow))
    list(before)
    read = iter(before)
    next(read), next(read)
    after.load_state_dict(before.state_dict())
    equal(list(after), rest := list(read))
    assert len(rest) == 5
    after.load_state_dict(before.state_dict())
    after.set_epoch(1)
    for _, state in zip(range(3), map(lambda batch: after.state_dict(), after)):
        pass
    after.load_state_dict(state)
    assert all(torch.equal(one["noise"], other["noise"]) for one, other in zip(after, rest[1:]))
    try:
        ud.data_service(DataLoader(slow)).state_dict()
    except ValueError as exc:
        assert "ud.data_service(ud.shard(loader))" in str(exc)
    try:
        list(ud.data_service(loader(Slow(0))))
    except Exception as exc:
        pathlib.Path(f"error-{rank}").write_text(f"{type(exc).__name__}: {exc}")
"""
_WAITED = """
    def waited(batches, seconds):
        before = recorder.data_sec
        for batch in batches:
            time.sleep(seconds)
        return recorder.data_sec - before

    slow = Slow(0.015)
    served = ud.data_service(loader(slow))
    list(served)  # meanwhile the workers import PyTorch
    found = {"plain": waited(loader(slow), 0.0), "served": waited(served, 0.08)}
    if rank == 0:
        pathlib.Path("waited").write_text(json.dumps(found))
"""
_KILL = """
    served, plain = ud.data_service(loader(Slow()), ahead=3), loader(Slow())
    found = []
    for epoch in range(2):
        for number, batch in enumerate(served):
            found.append(batch)
            if epoch == 0 and number == 2 and rank == 0:
                victim = served._batches.workers.links[1].name
                os.kill(int(victim.split("process ")[1].split(" ")[0]), getattr(signal, sys.argv[1]))
    equal(found, [*plain, *plain])
    if rank == 0:
        survivor = served._batches.workers.links[0].name
        os.kill(int(survivor.split("process ")[1].split(" ")[0]), signal.SIGKILL)
    began = time.monotonic()
    try:
        for _ in range(10):
            list(served)
    except Exception as exc:
        pathlib.Path(f"error-{rank}").write_text(f"{type(exc).__name__}: {exc}")
    assert time.monotonic() - began < 30
"""
_STREAM = """
    def batches(shard):
        for number in range(shard.index, 11, shard.count):
            yield torch.full((2,), number), "text"

    stream = ud.data_service(batches)
    found = [[int(batch[0][0]) for batch in stream] for _ in range(2)]
    pathlib.Path(f"stream-{rank}").write_text(json.dumps(found))
"""


def test_batches_are_those_of_the_loader(command: Command) -> None:
    done = command.run("launch", "-np", "2", "--data-workers", "2", command.script(_DATA + _EQUAL))
    assert done.returncode == 0, done.stderr
    (error,) = [path.read_text() for path in command.folder.glob("error-*")]  # of the rank that has this sample
    assert error.startswith("DataWorkerError: the dataset has raised KeyError in data worker"), error
    assert "sample 49 is broken" in error
    assert "__getitem__" in error


@pytest.mark.soak
def test_steps_wait_less_than_half_as_long_as_without_workers(command: Command) -> None:
    """On a machine that has nothing else to do."""
    done = command.run("launch", "-np", "2", "--data-workers", "2", command.script(_DATA + _WAITED))
    assert done.returncode == 0, done.stderr
    waited = json.loads((command.folder / "waited").read_text())
    assert waited["served"] < waited["plain"] / 2, waited


@pytest.mark.parametrize("way", ["SIGKILL", "SIGSTOP"])
def test_the_others_make_the_batches_of_a_worker_that_is_lost(command: Command, way: str) -> None:
    script = command.script(_DATA + _KILL)
    done = command.run(*("launch", "-np", "2", "--data-workers", "2"), script, way, env={"UNIDIST_HEARTBEAT_SEC": "2"})
    assert done.returncode == 0, done.stderr
    assert "the others make its batches" in done.stderr, done.stderr
    for rank in range(2):
        error = (command.folder / f"error-{rank}").read_text()
        assert error.startswith(f"PeerLostError: rank {rank}: no data worker is left: data worker 0 (process"), error


def test_each_batch_of_a_stream_goes_to_one_rank(command: Command) -> None:
    done = command.run("launch", "-np", "2", "--data-workers", "2", command.script(_DATA + _STREAM))
    assert done.returncode == 0, done.stderr
    first, second = [json.loads((command.folder / f"stream-{rank}").read_text()) for rank in range(2)]
    assert first == [[0, 1, 4, 5, 8, 9]] * 2  # of worker 0: 0 2, 4 6, 8 10; of worker 1: 1 3, 5 7, 9 1
    assert second == [[2, 3, 6, 7, 10, 1]] * 2


def test_a_job_without_data_workers_says_how_to_get_them(command: Command) -> None:
    done = command.run("launch", "-np", "1", command.script(_DATA + "\n    ud.data_service(loader(Slow()))"))
    assert done.returncode == 1
    assert "unidist launch --data-workers 2" in done.stderr


def test_options_that_do_not_go_together(command: Command) -> None:
    found = command.run("launch", "-np", "1", "--data-key-file", "key", command.script("pass"))
    assert (found.returncode, "give --data-workers, too" in found.stderr) == (2, True), found.stderr
    found = command.run_here("launch", "-np", "1", "--min-np", "1", "--data-workers", "1", command.script("pass"))
    assert (found.returncode, "in an elastic job" in found.stderr) == (2, True), found.stderr


def test_a_data_worker_joins_by_the_key(command: Command) -> None:
    code = """
    import pathlib
    served = ud.data_service(loader(Slow()))
    list(served)
    pathlib.Path("ready").touch()
    while not pathlib.Path("joined").exists():
        time.sleep(0.05)
    for _ in range(200):
        list(served)
        if 1 in served._batches.workers.links:
            break
        time.sleep(0.1)
    assert served._batches.workers.links.keys() == {0, 1}
    """
    words = ("launch", "-np", "1", "--data-workers", "1", "--data-key-file", "key", command.script(_DATA + code))
    with command.start(*words) as job:
        assert command.wait_until((command.folder / "ready").exists, 60)
        key = command.folder / "key"
        assert key.stat().st_mode & 0o777 == 0o600
        address = _address_of(command)
        wrong = command.run("data-worker", "--join", address, env={"UNIDIST_DATA_KEY": "00" * 32})
        assert wrong.returncode != 0
        with command.start("data-worker", "--join", address, "--key-file", "key") as joined:
            (command.folder / "joined").touch()
            _, told = job.communicate(timeout=60)
            assert job.returncode == 0, told
            assert f"--join {address}" in told
            heard, _ = joined.communicate(timeout=60)
    assert "this is data worker 1 of the job" in heard
    assert joined.returncode == 0, "it ends with the job"


def _address_of(command: Command) -> str:
    """Return where the job's values are served, from the environment of a rank."""
    for process in command.alive():
        address = process.environ().get("UNIDIST_JOB_VALUES")
        if address:
            return address
    raise AssertionError("no process of the job was found")
