"""Jobs whose parameter servers are lost: a replica goes on with every push; else all ranks say what is lost."""

from __future__ import annotations

import re

import pytest
from unidist_command import Command

pytest.importorskip("torch")
pytestmark = pytest.mark.parallel

_TRAIN = """
    import psutil, torch
    import unidist.torch as ud

    def gradient(rank, step):
        return torch.randint(-1000, 1000, (64,), generator=torch.Generator().manual_seed(100 * step + rank)).double()

    def lose_server(number):
        for process in psutil.Process(os.getppid()).children(recursive=True):
            words = process.cmdline()
            if words[-1:] == ["unidist_parameter_server.server"] and process.environ()["UNIDIST_ROLE_INDEX"] == number:
                process.{way}()

    ud.init()
    weights = torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))
    optimizer = ud.distribute(torch.nn.ParameterList([weights]), torch.optim.SGD([weights], lr=1.0))[1]
    try:
        for step in range(40):
            if rank == {killer} and step == 15:
                lose_server("{server}")
                killed = time.monotonic()
            optimizer.zero_grad()
            (weights * gradient(rank, step)).sum().backward()
            optimizer.step()
            time.sleep(0.005)
        ud.barrier()
        optimizer.zero_grad()
        (weights * 0).sum().backward()
        optimizer.step()
        expected = -sum(gradient(each, step) for each in range(ud.size()) for step in range(40))
        print("exact", rank, bool((weights.detach() == expected).all()), flush=True)
    finally:
        if rank == {killer}:
            print(f"after {{time.monotonic() - killed:.2f}} s", flush=True)
    ud.shutdown()
"""


def _train(command: Command, options: str, *, server: int, way: str = "kill") -> tuple[int, str, str]:
    script = command.script(_TRAIN.format(killer=0, server=server, way=way))
    line = f"parameter_server=async:scale=none:shard_size=64B:{options}"
    done = command.run("launch", "-np", "2", "--strategy", line, script, env={"UNIDIST_HEARTBEAT_SEC": "2"})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("server", "way"), [(0, "kill"), (1, "kill"), (1, "suspend")])
def test_a_replica_goes_on_and_every_push_is_applied_once(command: Command, server: int, way: str) -> None:
    code, out, err = _train(command, "servers=2:replicas=1", server=server, way=way)
    assert code == 0, err
    assert re.findall(r"exact (\d) (\w+)", out) in ([("0", "True"), ("1", "True")], [("1", "True"), ("0", "True")])
    assert f"takes over the parameters of server {server}, which is lost" in err
    assert f"ps {server}" in err, "the launcher says that it was killed"
    assert ("nothing was heard of it" in err) == (way == "suspend")


def test_without_a_replica_every_rank_says_what_is_lost(command: Command) -> None:
    code, out, err = _train(command, "servers=2", server=1)
    assert code != 0
    lost = re.search(r"lost server 1 at .*: (\d+) updates, since there is no checkpoint", err)
    assert lost is not None, err
    assert int(lost[1]) >= 15
    assert _seconds(out) < 30  # nobody waits until a silent server counts as lost


@pytest.mark.soak
def test_without_a_replica_every_rank_says_so_within_two_seconds(command: Command) -> None:
    """On a machine that has nothing else to do."""
    assert _seconds(_train(command, "servers=2", server=1)[1]) < 2.0


def _seconds(out: str) -> float:
    """Return for how long the rank that killed the server went on."""
    after = re.search(r"after ([\d.]+) s", out)
    assert after is not None, out
    return float(after[1])
