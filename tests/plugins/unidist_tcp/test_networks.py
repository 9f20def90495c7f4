"""The engine tcp between hosts with poor networks: short packets, delay, loss; and what is seen of it on the way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import slow_link
import ssh_hosts
from ssh_hosts import SshHosts

pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(ssh_hosts.why_not()), reason=ssh_hosts.why_not() or "hosts can be made"),
]
needs_slow_links = pytest.mark.skipif(bool(slow_link.why_not()), reason=slow_link.why_not() or "links can be slow")

RANDOM_PROGRAMS = """
from unidist.runtime import context
from unidist.testing.cases import message, stress

world = context.init().world
assert "tcp" in world.description, world.description
for seed in range({seeds}):
    stress.random_program(world, seed, {length})
message.messages_keep_their_order(world)
print("right", flush=True)
context.shutdown()
"""

KIT = """
from unidist.buffer import DType
from unidist.communicator import ReduceOp
from unidist.runtime import context
from unidist.testing.cases import collective, group, message, stress

world = context.init().world
assert "tcp" in world.description, world.description
types, reductions = tuple(DType), tuple(ReduceOp)
for case, *args in (
    (collective.allreduce_of_every_type, types, (), True),
    (collective.allreduce_of_large_arrays, (DType.FLOAT32, DType.BFLOAT16)),
    (collective.allreduce_rounds_little_and_identically, types),
    (collective.integer_means_are_exact_and_truncate, types),
    (collective.nan_reaches_every_rank, (DType.FLOAT32,), reductions),
    (collective.allgather, types, True),
    (collective.broadcast, types),
    (collective.reducescatter, types, (), True),
    (collective.alltoall, types),
    (message.ring,),
    (message.messages_keep_their_order,),
    (message.a_sent_buffer_may_be_changed_after_its_wait,),
    (message.receives_are_filled_in_the_order_asked,),
    (message.messages_and_collectives_mix,),
    (message.a_message_that_nobody_took_does_not_stop_a_barrier,),
    (message.a_receive_that_nobody_waits_for_does_not_stop_its_sender,),
    (message.a_message_of_another_size_is_a_mismatch,),
    (message.one_way_stream,),
    (group.works_are_waited_in_reverse,),
    (group.polling_alone_completes,),
    (group.splits_of_every_kind,),
    (group.a_split_without_this_rank_is_refused,),
    (group.parent_and_child_interleave,),
    (group.allocated_memory_is_zeroed_and_outlives_the_communicator,),
    (stress.random_program, 1, 120),
):
    found = case(world, *args)
    if isinstance(found, dict):  # of the bits that this rank has computed
        import zlib
        import numpy as np
        from unidist.buffer import Buffer

        mine = np.array([zlib.crc32(repr(sorted(found.items())).encode())], np.uint64)
        everyone = np.zeros(world.size, np.uint64)
        world.allgather(Buffer.of(mine), Buffer.of(everyone)).wait()
        assert len(set(everyone.tolist())) == 1, f"{{case.__name__}}: the ranks have different bits"
    if world.rank == 0:
        print(case.__name__, flush=True)
print("right", flush=True)
context.shutdown()
"""

FAR = {"delay_ms": 20.0}
LOSSY = {"loss": 0.01}
SHORT_PACKETS = {"mtu": 576}


@contextmanager
def made(num_hosts: int = 2, *, mtu: int = 0, delay_ms: float = 0.0, loss: float = 0.0) -> Iterator[SshHosts]:
    with SshHosts(num_hosts, delay_ms=delay_ms, loss=loss) as hosts:
        for name in hosts.names if mtu else ():
            hosts.narrow(name, mtu=mtu, rate="60mbit")
        yield hosts


def check(hosts: SshHosts, folder: Path, num_ranks: int, script: str, *options: str) -> str:
    """Run a script on ranks of two hosts; return what it has printed."""
    (folder / "script.py").write_text(script)
    first = (num_ranks + 1) // 2
    where = ("-np", str(num_ranks), "-H", f"h1:{first},h2:{first}", "--ssh-command", hosts.ssh_command)
    command = [sys.executable, "-m", "unidist_launch", "launch", *where, *options, "script.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("right") >= 1, done.stdout
    assert "lost" not in done.stderr, done.stderr
    return done.stdout


def test_random_programs_between_two_hosts_with_short_packets(tmp_path: Path) -> None:
    with made(mtu=576) as hosts:
        check(hosts, tmp_path, 2, RANDOM_PROGRAMS.format(seeds=1, length=60), "--timeout", "120")


@needs_slow_links
def test_random_programs_between_two_hosts_far_from_each_other_with_loss(tmp_path: Path) -> None:
    with made(delay_ms=20, loss=0.01) as hosts:
        check(hosts, tmp_path, 2, RANDOM_PROGRAMS.format(seeds=1, length=15), "--timeout", "120")


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "network",
    [
        pytest.param(SHORT_PACKETS, id="short packets"),
        pytest.param(FAR, id="20 ms", marks=needs_slow_links),
        pytest.param(LOSSY, id="1 % lost", marks=needs_slow_links),
    ],
)
def test_the_cases_of_the_kit_between_two_hosts(tmp_path: Path, num_ranks: int, network: dict[str, float]) -> None:
    """With the heartbeat that is the default: nobody is taken for dead."""
    with made(**network) as hosts:  # type: ignore[arg-type]
        check(hosts, tmp_path, num_ranks, KIT, "--timeout", "300")


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "env",
    [(), ("UNIDIST_HIERARCHICAL=0",), ("UNIDIST_HIERARCHICAL=0", "UNIDIST_TCP_CONNECTIONS=5"), ("UNIDIST_TLS=1",)],
)
def test_random_programs_with_short_packets(tmp_path: Path, num_ranks: int, env: tuple[str, ...]) -> None:
    options = [item for each in env for item in ("--env", each)]
    with made(mtu=576) as hosts:
        check(hosts, tmp_path, num_ranks, RANDOM_PROGRAMS.format(seeds=3, length=60), "--timeout", "120", *options)


TELLING = """
import numpy as np
from unidist.buffer import Buffer
from unidist.runtime import context

world = context.init().world
for number in range(200):
    memory = np.frombuffer(b"nobody shall read this" * 100, np.uint8).copy() * (world.rank == 0)
    world.broadcast(Buffer.of(memory), root=0).wait()
assert bytes(memory[:22]) == b"nobody shall read this"
print("right", world.description, flush=True)
context.shutdown()
"""


def test_who_listens_between_two_hosts_reads_the_data_without_tls_and_not_with_it(tmp_path: Path) -> None:
    with made() as hosts:
        with hosts.overheard("h2") as plain:
            assert "with TLS" not in check(hosts, tmp_path, 2, TELLING)
        with hosts.overheard("h2") as encrypted:
            assert "with TLS" in check(hosts, tmp_path, 2, TELLING, "--tls")
    assert plain.count(b"nobody shall read this") > 10_000
    assert len(encrypted) > 400_000
    assert b"nobody shall" not in encrypted
