"""`JaxState` keeps trees in host memory: what a failed or donating step does to its arrays changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _programs import on_one_rank, runtime
from part_pools import PartPools

import unidist.jax as ud
from unidist.elastic.peer.memory import PeerMemory
from unidist.errors import MismatchError, PeerLostError, UsageError

pytestmark = pytest.mark.parallel


def trees(rank: int = 0) -> tuple[Any, Any]:
    params = {"w": jnp.arange(6.0).reshape(2, 3) + rank, "key": jax.random.key(rank), "activation": jnp.tanh}
    return params, optax.adam(0.1).init({"w": params["w"]})


@on_one_rank
def test_restore_brings_back_the_last_commit_and_not_what_was_set_since() -> None:
    with runtime():
        params, opt_state = trees()
        state = ud.elastic.JaxState(params=params, opt_state=opt_state, epoch=0, seen=[1], averages=np.ones(2))
        step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
        for committed in (0.0, 1.0):
            for _ in range(2):
                before = state.params["w"]
                state.params = {**state.params, "w": step(state.params["w"])}
                assert before.is_deleted()
                state.opt_state = step(state.opt_state)
            state.epoch += 1
            state.seen.append(2)
            state.restore()
            np.testing.assert_array_equal(state.params["w"], np.arange(6.0).reshape(2, 3) + committed)
            assert state.params["activation"] is jnp.tanh
            assert jax.random.key_data(state.params["key"]).tolist() == jax.random.key_data(jax.random.key(0)).tolist()
            assert state.opt_state[0].count == committed
            assert (state.epoch, len(state.seen)) == (committed, 1 + committed)
            state.params = {**state.params, "w": step(state.params["w"])}
            state.opt_state = step(state.opt_state)
            state.epoch += 1
            state.seen.append(2)
            state.commit()
        kept = state.params["w"]
        step(kept)  # takes the memory of the array, and not that of the commit
        state.restore()
        np.testing.assert_array_equal(state.params["w"], np.arange(6.0).reshape(2, 3) + 2)
        assert state.averages.tolist() == [1.0, 1.0]


@on_one_rank
def test_a_commit_of_arrays_that_are_gone_leaves_the_one_before() -> None:
    with runtime():
        params, opt_state = trees()
        state = ud.elastic.JaxState(params=params, opt_state=opt_state)
        jax.jit(lambda x: x + 1, donate_argnums=0)(opt_state[0].nu["w"])
        state.params = {**params, "w": params["w"] + 5}
        with pytest.raises((UsageError, RuntimeError), match=r"donated|deleted"):
            state.commit()
        state.restore()
        np.testing.assert_array_equal(state.params["w"], np.arange(6.0).reshape(2, 3))


def test_a_commit_that_fails_leaves_the_whole_trees_of_the_one_before(jax_pools: PartPools) -> None:
    """Parameters are whole with `zero`, so they are kept by another handler than the shares, whose commit fails."""

    def on_rank() -> None:
        with runtime():
            params = {"w": jnp.zeros(4)}
            params, optimizer = ud.distribute(params, optax.adam(0.1), "zero=2")
            state = ud.elastic.JaxState(params=params, opt_state=optimizer.init(params), optimizer=optimizer, step=0)

            def lose_a_rank(*_: object, **__: object) -> None:
                raise PeerLostError("rank 1 was lost")

            @ud.elastic.run
            def train(state: ud.elastic.JaxState) -> None:
                for committed in range(1, 4):
                    state.params, state.step = {"w": jnp.full(4, float(committed))}, committed
                    state.commit()
                    for lost in range(2):
                        state.params, state.step = {"w": jnp.full(4, 10.0 + lost)}, 10 + lost
                        with pytest.MonkeyPatch.context() as patch:
                            patch.setattr(PeerMemory, "commit", lose_a_rank)
                            with pytest.raises(PeerLostError):
                                state.commit()
                        state.restore()
                        assert (float(state.params["w"][0]), state.step) == (committed, committed)

            train(state)

    jax_pools.get(2).run(on_rank)


def test_sync_gives_every_rank_the_trees_and_numbers_of_rank_0(jax_pools: PartPools) -> None:
    def on_rank() -> None:
        with runtime():
            params, opt_state = trees(ud.rank())
            state = ud.elastic.JaxState(
                params=params, opt_state=opt_state, step={"count": ud.rank(), "array": jnp.ones(())}, epoch=ud.rank()
            )
            state.sync()
            np.testing.assert_array_equal(state.params["w"], np.arange(6.0).reshape(2, 3))
            assert jax.random.key_data(state.params["key"]).tolist() == jax.random.key_data(jax.random.key(0)).tolist()
            assert (int(state.step["count"]), state.epoch) == (0, 0)
            state.params = {"w": jnp.zeros(1)}
            state.restore()  # synchronised is committed
            np.testing.assert_array_equal(state.params["w"], np.arange(6.0).reshape(2, 3))

    jax_pools.get(2, engine="shm").run(on_rank)


def test_the_function_is_run_in_any_job_and_an_error_is_our_own(jax_pools: PartPools) -> None:
    def on_rank() -> None:
        with runtime():
            state = ud.elastic.JaxState(params={"w": jnp.ones(2)}, epoch=0)

            @ud.elastic.run
            def train(state: Any) -> Any:
                state.params = jax.jit(lambda tree: ud.allreduce(tree, op=ud.Sum))(state.params)
                state.commit()
                return jax.jit(lambda x: ud.allreduce(x, name="loss"))(jnp.ones(2 + ud.rank())).block_until_ready()

            with pytest.raises(MismatchError, match="'loss'"):
                train(state)
            assert state.params["w"].tolist() == [2.0, 2.0]

    jax_pools.get(2, engine="shm").run(on_rank)


@on_one_rank
def test_a_state_goes_on_from_its_durable_checkpoint(tmp_path: Path) -> None:
    def train(folder: Path, *, until: int) -> Any:
        optimizer = optax.adam(0.1)
        params = {"w": jnp.zeros(3)}
        state = ud.elastic.JaxState(
            params=params, opt_state=optimizer.init(params), averages={"w": jnp.zeros(3)}, epoch=0
        )
        state.checkpoint_to(folder, interval=1e-6)

        @ud.elastic.run
        def loop(state: Any) -> int:
            began: int = state.epoch
            while state.epoch < until:
                gradients = jax.tree.map(lambda leaf: leaf - 1, state.params)
                updates, state.opt_state = optimizer.update(gradients, state.opt_state, state.params)
                state.params = optax.apply_updates(state.params, updates)
                state.averages = jax.tree.map(lambda a, b: 0.9 * a + b, state.averages, state.params)
                state.epoch += 1
                state.commit()
            return began

        return loop(state), state

    with runtime():
        _, wanted = train(tmp_path / "whole", until=4)
        train(tmp_path / "parts", until=2)
        began, found = train(tmp_path / "parts", until=4)
        assert began == 2
        for name in ("params", "opt_state", "averages"):
            jax.tree.map(np.testing.assert_array_equal, getattr(found, name), getattr(wanted, name))
        loaded = ud.load(tmp_path / "parts", found.params, found.opt_state)  # an ordinary checkpoint
        np.testing.assert_array_equal(loaded.params["w"], wanted.params["w"])


def test_a_rank_that_joins_has_the_count_of_updates_of_the_others(jax_pools: PartPools) -> None:
    def on_rank() -> list[int]:
        with runtime():
            params, optimizer = ud.distribute({"w": jnp.ones(3)}, optax.adam(0.1))
            state = ud.elastic.JaxState(params=params, opt_state=optimizer.init(params), optimizer=optimizer)
            update = optimizer.binding.distributed_update
            update.step = 7 * (1 - ud.rank())
            state.sync()
            found = [update.step]
            update.step = 9
            state.restore()
            return [*found, update.step]

    assert jax_pools.get(2, engine="shm").run(on_rank) == [[7, 7], [7, 7]]
