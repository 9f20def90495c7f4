"""Elastic state in a job whose ranks stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from _training import runtime

import unidist.torch as hvd
from unidist.elastic import HostUpdateResult
from unidist.errors import PeerLostError
from unidist.jobs.pool.pool import RankPool
from unidist.training.sharding import padded_share, shuffled

Pool = Callable[..., RankPool]
pytestmark = pytest.mark.parallel


def test_every_sample_is_dealt_out_once_and_the_first_again_to_fill_up() -> None:
    order = shuffled(10, seed=1, epoch=2)
    assert sorted(order) == list(range(10))
    assert order != shuffled(10, seed=1, epoch=3)
    shares = [padded_share(order, rank=rank, size=4) for rank in range(4)]
    assert [len(share) for share in shares] == [3] * 4
    assert sorted(itertools.chain(*shares)) == sorted([*order, *order[:2]])
    assert padded_share([5], rank=2, size=4) == [5]
    assert padded_share([], rank=0, size=4) == []


def test_run_makes_the_ranks_equal_and_commit_and_restore_go_back(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            torch.manual_seed(hvd.rank())
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (hvd.rank() + 1))
            sampler = hvd.elastic.ElasticSampler(range(9), shuffle=False)
            state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=hvd.rank() + 5, log=[hvd.rank()])

            @hvd.elastic.run
            def train(state: hvd.elastic.TorchState, word: str) -> str:
                weights = hvd.allgather(model.weight[None])
                assert torch.equal(weights[0], weights[1])
                assert (state.epoch, state.log) == (5, [0])
                assert optimizer.param_groups[0]["lr"] == 0.1
                kept = model.weight.detach().clone()
                state.commit()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                state.epoch = 6
                state.log.append(1)
                sampler.record_batch(0, 2)
                assert not torch.equal(model.weight, kept)
                state.restore()
                assert torch.equal(model.weight, kept)
                assert (state.epoch, state.log, sampler.processed_num) == (5, [0], 0)
                sampler.record_batch(0, 2)
                state.commit()
                sampler.reset()
                assert sampler.remaining_indices == [4, 5, 6, 7, 8]
                assert list(sampler) == ([4, 6, 8] if hvd.rank() == 0 else [5, 7, 4])
                return word

            assert train(state, "done") == "done"

    pool(2, "shm").run(on_rank)


def test_changed_hosts_run_the_callbacks_and_the_function_again(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            state = hvd.elastic.ObjectState(tries=0)
            resets: list[int] = []
            state.register_reset_callbacks([lambda: resets.append(state.tries)])

            @hvd.elastic.run
            def train(state: hvd.elastic.ObjectState) -> int:
                state.tries += 1
                if state.tries < 3:
                    raise hvd.elastic.HostsUpdatedInterrupt(skip_sync=state.tries == 1)
                return state.tries

            assert train(state) == 3
            assert resets == [1, 2]

    pool(2, "shm").run(on_rank)


def test_what_one_rank_is_told_of_hosts_interrupts_all(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            state = hvd.elastic.TorchState(step=0)
            for told in (0, 1):
                if hvd.rank() == told:
                    state.on_hosts_updated(1, HostUpdateResult.removed)
                with pytest.raises(hvd.elastic.HostsUpdatedInterrupt) as caught:
                    state.check_host_updates()
                assert caught.value.skip_sync
                state.check_host_updates()

    pool(2, "shm").run(on_rank)


def test_a_lost_rank_restores_the_state_and_says_that_nobody_replaces_it(pool: Pool) -> None:
    def on_rank() -> None:
        with runtime():
            state = hvd.elastic.ObjectState(step=1)

            @hvd.elastic.run
            def train(state: hvd.elastic.ObjectState) -> None:
                state.step = 2
                raise hvd.HorovodInternalError("rank 1 died")

            with pytest.raises(PeerLostError) as caught:
                train(state)
            assert "not started to survive" in caught.value.__notes__[0]
            assert state.step == 1

    pool(1, "single").run(on_rank)
