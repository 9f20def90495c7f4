"""Operations in programs for several devices of a process: each runs once, in order, on what the devices hold."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _programs import recorded, runtime
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from part_pools import PartOfPool
from unidist_command import Command

import unidist.jax as ud
from unidist.errors import MismatchError, StalledError, UsageError
from unidist_jax.compiled.devices import DeviceRendezvous

pytestmark = pytest.mark.parallel


def _on_mesh(array: Any, *dims: str) -> Any:
    """Return an array on both devices, its dims divided where they are named."""
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*dims)))


def test_every_operation_takes_what_all_devices_hold_and_runs_once(two_with_devices: PartOfPool) -> None:
    def on_rank() -> list[str]:
        with runtime(), recorded() as calls:
            rank = ud.rank()
            everyone = [np.arange(8.0).reshape(4, 2) + 10 * each for each in range(2)]

            def body(x: Any) -> Any:
                ud.allreduce(x.sum(), name="unused")
                ud.barrier()
                if rank:
                    got = ud.recv(x, 0)
                else:
                    ud.send(x, 1)
                    got = x
                return (
                    ud.allreduce(x, op=ud.Sum, name="sum"), ud.allreduce(x.mean(), name="mean"), ud.allgather(x),
                    ud.broadcast(x, 1), ud.reducescatter(x, op=ud.Sum), ud.alltoall(x), got,
                )  # fmt: skip

            compiled = jax.jit(body)
            for _ in range(2):
                calls.clear()
                found = jax.block_until_ready(compiled(_on_mesh(everyone[rank], "rows")))
            total, half = sum(everyone), slice(2 * rank, 2 * rank + 2)
            wanted = (
                total, np.mean(everyone), np.concatenate(everyone), everyone[1], total[half],
                np.concatenate([each[half] for each in everyone]), everyone[0],
            )  # fmt: skip
            for each, array in zip(wanted, found, strict=True):
                assert len(array.addressable_shards) == 2
                for shard in array.addressable_shards:
                    np.testing.assert_array_equal(shard.data, np.asarray(each)[shard.index])
            return list(calls)

    found = two_with_devices.run(on_rank)
    for calls, message in zip(found, ("send to rank 1", "recv from rank 0"), strict=True):
        own = [title.split()[0] for title in calls]
        assert calls.count(message) == 2  # one of each device
        assert own[::2] == own[1::2]
        kinds = ["allreduce", "barrier", "send", "allreduce", "allreduce", "allgather", "broadcast"]
        kinds += ["reducescatter", "alltoall"]
        assert own[::2] == [message.split()[0] if kind == "send" else kind for kind in kinds]


def test_calls_keep_their_order_through_loops_and_branches(two_with_devices: PartOfPool) -> None:
    def on_rank() -> None:
        from unidist_jax.operations import collectives

        with runtime():
            ran: list[str] = []
            monkeypatch = pytest.MonkeyPatch()
            plain = collectives.AllReduce.prepared

            def prepared(self: Any, *memory: Any) -> Any:
                run = plain(self, *memory)
                return lambda: ran.append(self.name) or run()

            monkeypatch.setattr(collectives.AllReduce, "prepared", prepared)

            def summed(name: str, x: Any) -> Any:
                return ud.allreduce(x, op=ud.Sum, name=name)

            def program(x: Any) -> Any:
                summed("unused", x)
                y = jax.lax.scan(lambda c, _: (summed("scan", c), None), x, None, length=2)[0]
                z = jax.lax.cond(x.sum() > 0, lambda: summed("yes", x * 1.0), lambda: summed("no", x * 1.0))
                w = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, summed("while", c[1])), (0, x))[1]
                same = summed("same", x[0]) + summed("same", x[0])
                gradient = jax.grad(jax.checkpoint(lambda v: jnp.sum(summed("loss", v) ** 2)))(x)
                return y, z, w, same, gradient

            x = np.arange(1.0, 5.0)
            once = ["unused", "scan", "scan", "yes", "while", "while", "same", "same", "loss"]
            compiled = jax.jit(program)
            for _ in range(3):
                ran.clear()
                results = compiled(_on_mesh(x, "rows"))
                ud.flush()  # waits for programs for several devices, too
                assert ran == [*once, "loss", "loss.grad"] or ran == [*once, "loss.grad"]
                y, z, w, same, gradient = results
                np.testing.assert_array_equal(y, 4 * x)
                np.testing.assert_array_equal(z, 2 * x)
                np.testing.assert_array_equal(w, 4 * x)
                assert same == 4.0
                np.testing.assert_array_equal(gradient, 2 * 2 * 2 * x)
            monkeypatch.undo()

    two_with_devices.run(on_rank)


def test_an_error_ends_the_program_of_each_device(two_with_devices: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            compiled = jax.jit(lambda x: jnp.sin(ud.allreduce(x, name="loss") @ x.T).sum())
            for _ in range(2):
                began = time.monotonic()
                with pytest.raises(MismatchError, match="'loss'"), ud.translated():
                    compiled(_on_mesh(np.ones((4, 2 + ud.rank())), "rows")).block_until_ready()
                assert time.monotonic() - began < 30
                assert compiled(_on_mesh(np.ones((4, 1)), "rows")) == pytest.approx(16 * np.sin(1))

    two_with_devices.run(on_rank)


def test_operations_called_at_once_leave_arrays_where_they_are(two_with_devices: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            x = _on_mesh(np.arange(4.0) + ud.rank(), "rows")
            total = ud.allreduce(x, op=ud.Sum)
            assert total.sharding == x.sharding
            assert total.tolist() == [1.0, 3.0, 5.0, 7.0]
            assert ud.allgather(x).tolist() == [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]
            params = ud.broadcast_parameters({"w": x})
            assert (params["w"].sharding, params["w"].tolist()) == (x.sharding, [0.0, 1.0, 2.0, 3.0])

    two_with_devices.run(on_rank)


def test_each_device_for_itself_is_an_error_that_says_what_to_do(two_with_devices: PartOfPool) -> None:
    def on_rank() -> None:
        with runtime():
            x = _on_mesh(np.arange(4.0), "rows")

            def mapped(function: Any) -> Any:
                rows = PartitionSpec("rows")
                return jax.shard_map(function, mesh=x.sharding.mesh, in_specs=rows, out_specs=rows)

            with pytest.raises(UsageError, match="'a' is within shard_map or pmap over 2 devices of this process"):
                jax.jit(mapped(lambda x: ud.allreduce(x, name="a")))(x)
            with pytest.raises(UsageError, match="call the operation outside of shard_map"):
                jax.pmap(lambda x: ud.allreduce(x, name="a"))(x.reshape(2, 2))
            assert jax.jit(lambda x: ud.allreduce(mapped(jnp.cumsum)(x), name="b"))(x).tolist() == [0, 1, 2, 5]
            second = jax.device_put(jnp.arange(4.0), jax.devices()[1])
            assert jax.jit(ud.allreduce)(second).device == jax.devices()[1]
            one = jax.shard_map(
                lambda x: ud.allreduce(x, name="c"),
                mesh=Mesh(np.array(jax.devices()[1:]), ("rows",)),
                in_specs=PartitionSpec("rows"),
                out_specs=PartitionSpec("rows"),
                check_vma=False,
            )
            assert jax.jit(one)(np.arange(4.0)).tolist() == [0.0, 1.0, 2.0, 3.0]

    two_with_devices.run(on_rank)


def test_calls_meet_again_and_again() -> None:
    done: list[list[tuple[int, ...]]] = []
    meeting = DeviceRendezvous(3, "allreduce 'x'", lambda calls: done.append(sorted(calls)) or f"error {len(done)}")
    found: list[list[str | None]] = [[], [], []]

    def call(device: int) -> None:
        for index in range(100):
            found[device].append(meeting.run((index, device)))

    threads = [threading.Thread(target=call, args=(device,)) for device in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[f"error {index}" for index in range(1, 101)]] * 3
    assert done == [[(index, device) for device in range(3)] for index in range(100)]


def test_a_device_that_does_not_come_is_an_error() -> None:
    meeting = DeviceRendezvous(2, "allreduce 'x'", lambda calls: None, limit=timedelta(seconds=0.05))
    for _ in range(2):
        with pytest.raises(StalledError, match=r"allreduce 'x': 1 of the 2 devices .* have not within 0\.05 s"):
            meeting.run((1,))


_KILLED = """
import threading, jax, jax.numpy as jnp, numpy as np, optax, unidist.jax as ud
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from unidist.errors import PeerLostError

signal.signal(signal.SIGTERM, signal.SIG_IGN)
ud.init()
def loss(params, x):
    step = lambda c, _: (ud.allreduce(jnp.tanh(c @ c), name="activation"), None)
    return jnp.mean(jax.lax.scan(step, x[:50] * params["w"], None, length=100000)[0])
mesh = Mesh(np.array(jax.devices()), ("rows",))
assert mesh.size == 2
train = ud.TrainStep(loss, jax.device_put({"w": jnp.ones(())}, NamedSharding(mesh, PartitionSpec())), optax.sgd(0.1))
def die():
    time.sleep(4)
    open("died", "w").write(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    threading.Thread(target=die).start()
try:
    train(np.ones((100, 50), np.float32))
except PeerLostError as exc:
    print("lost", "rank 1" in str(exc), time.time() - float(open("died").read()), flush=True)
os._exit(3)
"""


def test_a_rank_that_is_killed_within_a_step_ends_all_devices_of_the_others(command: Command) -> None:
    script = command.script(_KILLED)
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "UNIDIST_ENGINE": "shm"}
    done = command.run("launch", "-np", "2", "--grace-period", "20", sys.executable, script, env=env)
    [found] = [line.split("lost ")[1].split() for line in done.stdout.splitlines() if "lost " in line]
    assert found[0] == "True", done.stderr
    assert float(found[1]) < 30  # what is promised is 1; other tests may run
