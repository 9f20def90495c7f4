"""Who is in the next world of an elastic job: no messages, no clock."""

from __future__ import annotations

import pytest

from unidist.control.elastic.membership import GATHER_SEC, NO_STATE, Membership, Phase, World
from unidist.control.elastic.replicas import ReplicaShape


def membership(*workers: int, first: int | None = None, least: int = 1, most: int = 4) -> Membership:
    """Return a membership in which these workers, all of host 0, wait."""
    made = Membership(num_first=first or len(workers) or 1, min_num=least, max_num=most)
    for number in workers:
        come(made, number)
    return made


def come(made: Membership, number: int, *, progress: int = NO_STATE, now: float = 0.0, host: int = 0) -> None:
    if number not in made.workers:
        made.expect(number, host)
    made.ready(number, progress, now)


def ranks(world: World) -> dict[int, int]:
    return {place.rank: number for number, place in world.places.items()}


def test_the_first_world_waits_for_all_of_its_workers() -> None:
    made = membership(0, 1, first=3)
    assert not made.can_form()
    come(made, 2)
    assert made.can_form()
    world = made.form(0)
    assert ranks(world) == {0: 0, 1: 1, 2: 2}
    assert world.needs_sync


def test_the_first_world_may_begin_with_fewer_when_it_was_told_so() -> None:
    made = membership(0, 1, first=3, least=2)
    made.accepts_fewer = True
    assert made.can_form()


def test_no_world_begins_before_the_last_member_has_come_back() -> None:
    made = membership(0, 1, 2)
    made.form(0)
    come(made, 0, progress=5)
    come(made, 2, progress=5)
    assert not made.can_form()
    made.remove(1)
    assert made.can_form()


def test_the_worker_that_committed_most_becomes_rank_0() -> None:
    made = membership(0, 1, 2)
    made.form(0)
    come(made, 0, progress=9)
    come(made, 1, progress=10)
    come(made, 2, progress=10)
    world = made.form(1)
    assert ranks(world)[0] == 1
    assert world.progress == 10
    assert world.needs_sync


def test_survivors_go_first_and_one_without_state_never_leads() -> None:
    made = membership(0, 1, 2)
    made.form(0)
    made.remove(0)
    come(made, 3)
    come(made, 1, progress=4)
    come(made, 2, progress=4)
    assert ranks(made.form(1)) == {0: 1, 1: 2, 2: 3}


def test_equal_members_that_came_back_by_agreement_need_no_sync_and_others_do() -> None:
    made = membership(0, 1, 2)
    made.form(0)
    made.leave(2)
    for number in (0, 1, 2):
        come(made, number, progress=7)
    world = made.form(1)
    assert (ranks(world), world.dismissed, world.needs_sync) == ({0: 0, 1: 1}, (2,), False)
    come(made, 0, progress=8)
    come(made, 1, progress=8)
    assert made.form(2, after_loss=True).needs_sync


def test_more_than_the_most_wait_outside() -> None:
    made = membership(0, 1, 2, first=2, most=2)
    assert sorted(ranks(made.form(0)).values()) == [0, 1]
    assert made.workers[2].phase is Phase.WAITING
    assert not made.wants_change(100.0)


def test_one_that_stands_by_takes_the_place_of_a_lost_one_at_once() -> None:
    made = membership(0, 1, first=2, most=2)
    made.form(0)
    assert made.standing_by == []
    come(made, 2)
    assert [worker.number for worker in made.standing_by] == [2]
    assert not made.others_join
    made.leave(1)
    assert made.others_join
    made.remove(1)
    come(made, 0, progress=4)
    assert made.standing_by == []  # no world is under way
    assert ranks(made.form(1, after_loss=True)) == {0: 0, 1: 2}


def test_a_host_takes_no_more_newcomers_than_it_has_room_for() -> None:
    made = Membership(num_first=2, min_num=1, max_num=8)
    for number, host in ((0, 0), (1, 1)):
        made.limit_host(host, 1)
        come(made, number, host=host)
    made.form(0)
    come(made, 2, host=0)
    come(made, 3, host=1)
    assert not made.wants_change(100.0)
    assert [worker.number for worker in made.standing_by] == [2, 3]
    again = Membership(num_first=2, min_num=1, max_num=8)
    again.restore(made.snapshot(), 0.0)
    for each in (made, again):
        each.remove(1)
        come(each, 0, progress=4)
        assert ranks(each.form(1, after_loss=True)) == {0: 0, 1: 3}  # 2 has no room beside 0
    made.limit_host(0, 2)
    assert made.wants_change(200.0)
    assert made.standing_by == []


def test_members_of_the_last_world_stay_where_their_host_has_lost_room() -> None:
    made = membership(0, 1)
    made.form(0)
    made.limit_host(0, 1)
    come(made, 0, progress=4)
    come(made, 1, progress=4)
    assert ranks(made.form(1)) == {0: 0, 1: 1}


def test_fewer_than_the_least_wait_for_others() -> None:
    made = membership(0, 1, 2, least=2)
    made.form(0)
    made.remove(1)
    made.remove(2)
    come(made, 0, progress=3)
    assert not made.can_form()
    come(made, 3)
    assert made.can_form()


def test_newcomers_are_gathered_for_a_moment_and_not_for_ever() -> None:
    made = membership(0)
    made.form(0)
    made.expect(1, 0)
    made.expect(2, 0)
    made.ready(1, NO_STATE, 10.0)
    assert not made.wants_change(10.0)
    assert made.wants_change(10.0 + GATHER_SEC)
    made.ready(2, NO_STATE, 10.1)
    assert made.wants_change(10.1)


def test_a_member_that_is_to_leave_changes_the_world() -> None:
    made = membership(0, 1)
    made.form(0)
    assert not made.wants_change(0.0)
    made.leave(1)
    assert made.wants_change(0.0)


def test_where_all_are_to_leave_they_give_what_they_have_to_newcomers_first() -> None:
    made = membership(0, 1, most=2)
    made.form(0)
    for number in (0, 1):
        made.leave(number)
        come(made, number, progress=7)
    assert not made.can_form()
    come(made, 2)
    come(made, 3)
    world = made.form(1)
    assert (ranks(world), world.progress, world.needs_sync) == ({0: 0, 1: 1, 2: 2}, 7, True)
    for number in (0, 1, 2):
        come(made, number, progress=8)
    world = made.form(2)
    assert (ranks(world), world.progress, world.dismissed) == ({0: 2, 1: 3}, 8, (0, 1))


def test_after_a_loss_one_that_is_to_leave_goes_along_once_more() -> None:
    made = membership(0, 1, 2)
    made.form(0)
    made.leave(1)
    made.remove(2)
    come(made, 1, progress=7)
    assert not made.can_form(after_loss=True)
    come(made, 0, progress=7)
    assert ranks(made.form(1, after_loss=True)) == {0: 0, 1: 1}
    assert made.wants_change(0.0), "it leaves at the next commit"
    for worker in (0, 1):
        come(made, worker, progress=8)
    world = made.form(2)
    assert (ranks(world), world.dismissed) == ({0: 0}, (1,))


def test_those_that_are_to_leave_form_no_world_by_themselves() -> None:
    made = membership(0, 1)
    made.form(0)
    made.leave(0)
    made.remove(1)
    come(made, 0, progress=7)
    assert not made.somebody_stays
    assert not made.can_form(after_loss=True)
    made.expect(2, 0)
    assert made.somebody_stays
    assert not made.can_form(after_loss=True)
    come(made, 2)
    assert ranks(made.form(1, after_loss=True)) == {0: 0, 1: 2}


def test_newcomers_do_not_begin_again_what_others_have_just_come_to_the_end_of() -> None:
    made = membership(0, 1)
    made.form(0)
    come(made, 2)
    made.detach(0)
    made.detach(1)  # their processes may take a while to end
    assert not made.can_form()
    made.remove(0)
    assert not made.can_form()
    made.remove(1)
    assert made.can_form()  # neither had come to the end, or nobody would be taken in any more


def test_near_the_end_nobody_is_taken_in_and_few_are_enough() -> None:
    made = membership(0, 1, 2, least=3)
    made.form(0)
    made.remove(0)
    made.is_finishing = True
    come(made, 3)
    assert not made.wants_change(100.0)
    come(made, 1, progress=5)
    come(made, 2, progress=5)
    assert ranks(made.form(1)) == {0: 1, 1: 2}


@pytest.mark.parametrize("furthest", [0, 3])
def test_ranks_of_a_host_are_consecutive_and_know_their_place(furthest: int) -> None:
    made = Membership(num_first=4, min_num=1, max_num=4)
    for number, host in enumerate((0, 1, 0, 1)):
        come(made, number, host=host)
    made.form(0)
    for number in range(4):
        come(made, number, progress=6 if number == furthest else 5)
    places = made.form(1).places
    assert places[furthest].rank == 0
    by_rank = sorted(places.values(), key=lambda place: place.rank)
    assert [place.node_rank for place in by_rank] == [0, 0, 1, 1]
    assert [place.local_rank for place in by_rank] == [0, 1, 0, 1]
    assert {(place.local_size, place.num_nodes, place.world_size) for place in by_rank} == {(2, 2, 4)}


# Worlds whose model is divided


def divided(*workers: int, least: int = 1, most: int = 4) -> Membership:
    """Return a membership of a model that is divided over pipeline=2, in which these workers wait."""
    made = Membership(num_first=len(workers), min_num=least, max_num=most, shape=ReplicaShape(outer=2))
    for number in workers:
        come(made, number)
    return made


def test_ranks_train_in_whole_replicas_and_who_is_over_stands_by() -> None:
    made = divided(0, 1, 2, 3)
    made.form(0)
    made.remove(3)
    for number in (0, 1, 2):
        come(made, number, progress=5)
    assert made.missing_parts == (1,)
    assert made.can_form(after_loss=True)
    assert ranks(made.form(1, after_loss=True)) == {0: 0, 1: 2}
    assert [worker.number for worker in made.standing_by] == [1]
    assert not made.wants_change(100.0)

    come(made, 4)  # a process that takes the place of the lost one
    assert made.wants_change(100.0)
    for number in (0, 2):
        come(made, number, progress=8)
    world = made.form(2)
    assert ranks(world) == {0: 0, 1: 1, 2: 2, 3: 4}
    assert world.needs_sync


def test_a_spare_takes_the_part_of_the_lost_rank_at_once() -> None:
    made = divided(0, 1, 2, 3)
    made.form(0)
    come(made, 4)
    made.remove(2)
    for number in (0, 1, 3):
        come(made, number, progress=5)
    assert ranks(made.form(1, after_loss=True)) == {0: 0, 1: 1, 2: 4, 3: 3}
    assert made.workers[4].part == 1


def test_no_world_forms_while_nobody_is_there_for_a_part() -> None:
    made = divided(0, 1, 2, 3)
    made.form(0)
    for number in (2, 3):  # both of the last stage
        made.remove(number)
    for number in (0, 1):
        come(made, number, progress=5)
    assert not made.can_form(after_loss=True)
    assert (made.missing_parts, made.num_newcomers_needed) == ((1,), 1)
    come(made, 4)
    assert made.can_form(after_loss=True)
    assert made.num_newcomers_needed == 1  # which has come


def test_a_model_that_is_whole_needs_nobody_for_a_part() -> None:
    made = Membership(num_first=2, min_num=2, max_num=2)
    come(made, 0)
    assert made.num_newcomers_needed == 0


def test_the_fewest_ranks_are_whole_replicas() -> None:
    made = divided(0, 1, 2, 3, least=3)
    assert made.min_num == 4
    made.form(0)
    made.remove(3)
    for number in (0, 1, 2):
        come(made, number, progress=5)
    assert not made.can_form(after_loss=True)


def test_parts_outlive_the_launcher() -> None:
    made = divided(0, 1, 2, 3)
    made.form(0)
    again = divided()
    again.restore(made.snapshot(), 0.0)
    assert [again.workers[number].part for number in range(4)] == [0, 0, 1, 1]
    assert [again.workers[number].replica for number in range(4)] == [0, 1, 0, 1]


def test_another_launcher_does_not_wait_again_for_those_the_first_one_gave_up() -> None:
    made = Membership(num_first=3, min_num=2, max_num=4)
    for number in (0, 1):
        made.expect(number, 0)
        made.ready(number, NO_STATE, 0.0)
    made.accepts_fewer = True
    again = Membership(num_first=3, min_num=2, max_num=4)
    again.restore(made.snapshot(), 0.0)
    assert again.can_form()
