"""Who is to blame, and how it is told."""

from __future__ import annotations

from unidist_launch.remote.failure import (
    SETTLE_FOR_CULPRIT_SEC,
    SETTLE_SEC,
    RankExit,
    choose_culprit,
    report,
    settle_seconds,
)


def ended(rank: int, code: int, *, round: int = 1, tail: str = "", signalled: bool = False) -> RankExit:
    return RankExit(rank, 1000 + rank, code, round, tuple(tail.splitlines()), signalled)


HEADER = "Traceback (most recent call last):\n"
VALUE_ERROR = f"warning: x\n{HEADER}  File 'a.py', line 1, in f\n    f()\nValueError: boom\n  more of it"
PEER_LOST = f"{HEADER}  File 'a.py'\nunidist.errors.PeerLostError: rank 1 is gone"
STALLED = f"{HEADER}  File 'a.py'\nunidist.errors.StalledError: rank 1 did not come"
DEADLOCK = f"{HEADER}  File 'a.py'\nunidist.errors.DeadlockError: they wait:\n  rank 0 waits"
MISMATCH = f"{HEADER}  File 'a.py'\nunidist.errors.MismatchError: the shapes differ"
CHAINED = f"{HEADER}KeyError: 1\n\nDuring handling:\n\n{HEADER}  File 'b.py'\nTypeError"

IN_GRAPH = (
    f"{HEADER}  File 'a.py'\nValueError: in user code:\n\n    File \"a.py\", line 5, in f  *\n        raise x\n\n"
    "    ValueError: the batch is odd\n    and more of it\n"
)


def test_no_failure_no_culprit() -> None:
    assert choose_culprit([]) is None
    assert choose_culprit([ended(0, 0), ended(1, -15, signalled=True)]) is None


def test_the_first_to_end_is_to_blame() -> None:
    exits = [ended(2, 1, round=3), ended(1, 7, round=4), ended(0, -9, round=5)]
    assert choose_culprit(exits) is exits[0]


def test_of_those_seen_together_the_one_that_a_signal_killed() -> None:
    exits = [ended(0, 1, tail=VALUE_ERROR), ended(1, -9)]
    assert choose_culprit(exits) is exits[1]


def test_a_rank_that_lost_its_peer_is_not_to_blame_even_if_seen_first() -> None:
    for tail in (PEER_LOST, STALLED):
        exits = [ended(0, 1, round=1, tail=tail), ended(1, 3, round=5)]
        assert choose_culprit(exits) is exits[1]


def test_if_all_lost_a_peer_the_first_is_named() -> None:
    exits = [ended(1, 1, round=1, tail=PEER_LOST), ended(0, 1, round=2, tail=PEER_LOST)]
    assert choose_culprit(exits) is exits[0]


def test_the_decision_waits_longer_while_only_victims_have_ended() -> None:
    assert settle_seconds([ended(0, 1, tail=PEER_LOST)]) == SETTLE_FOR_CULPRIT_SEC
    assert settle_seconds([ended(0, 1, tail=PEER_LOST), ended(1, 1, tail=VALUE_ERROR)]) == SETTLE_SEC


def test_the_last_of_chained_tracebacks_counts() -> None:
    assert ended(0, 1, tail=CHAINED).exception_line == "TypeError"
    assert ended(0, 1, tail=IN_GRAPH).exception_line == "ValueError: the batch is odd"


def test_a_fatal_error_of_the_interpreter_is_a_traceback_too() -> None:
    tail = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n  File 'a.py', line 3"
    )
    assert ended(0, -11, tail=tail).traceback[0] == "Fatal Python error: Segmentation fault"


def test_exit_codes_are_a_shells() -> None:
    assert [ended(0, code).exit_code for code in (0, 7, -9, -11)] == [0, 7, 137, 139]


def test_the_report_names_rank_host_process_and_cause_and_leaves_the_traceback_to_the_output() -> None:
    exits = [ended(1, 1, tail=VALUE_ERROR), ended(0, -15, signalled=True), ended(2, -15, signalled=True), ended(3, 4)]
    text = report(exits[0], exits, "somewhere")
    assert text.splitlines() == [
        "unidist: rank 1 failed first (host somewhere, pid 1001): ValueError: boom (exit code 1)",
        "unidist: ended by the launcher: ranks 0,2",
        "unidist: also failed: rank 3: exit code 4",
        "unidist: exit code 1",
    ]


def test_ranks_that_failed_alike_and_those_that_lost_their_peer_are_a_line_each() -> None:
    exits = [ended(0, 1, tail=VALUE_ERROR), ended(1, 1, tail=PEER_LOST), ended(2, 1, tail=VALUE_ERROR)]
    exits += [ended(3, 1, tail=STALLED), ended(4, 1, tail=CHAINED), ended(5, 1, tail=VALUE_ERROR)]
    assert report(exits[0], exits, "h").splitlines()[1:] == [
        "unidist: failed in consequence: ranks 1,3 (PeerLostError, StalledError)",
        "unidist: also failed: ranks 2,5: the same",
        "unidist: also failed: rank 4: TypeError",
        "unidist: exit code 1",
    ]


def test_an_error_that_the_group_raises_is_blamed_on_a_rank_that_failed_otherwise() -> None:
    exits = [ended(0, 1, round=1, tail=DEADLOCK), ended(1, 1, round=2, tail=VALUE_ERROR)]
    assert settle_seconds(exits[:1]) == SETTLE_FOR_CULPRIT_SEC
    assert choose_culprit(exits) is exits[1]
    assert choose_culprit([*exits[:1], ended(2, 1, tail=PEER_LOST)]) is exits[0]
    assert report(exits[0], exits[:1], "h").startswith(
        "unidist: rank 0 failed first (host h, pid 1000): unidist.errors.DeadlockError: they wait (exit code 1)"
    )


def test_ranks_that_raise_an_error_of_their_group_are_named_together() -> None:
    exits = [ended(0, 1, round=2, tail=MISMATCH), ended(1, 1, round=1, tail=MISMATCH)]
    culprit = choose_culprit(exits)
    assert culprit is exits[1]
    assert report(culprit, exits, "h").splitlines() == [
        "unidist: all ranks raised together: unidist.errors.MismatchError: the shapes differ (exit code 1)",
        "unidist: exit code 1",
    ]
    exits = [*exits, ended(2, 1, tail=PEER_LOST), ended(3, -15, signalled=True)]
    assert report(culprit, exits, "h").splitlines() == [
        "unidist: ranks 0-1 raised together: unidist.errors.MismatchError: the shapes differ (exit code 1)",
        "unidist: ended by the launcher: rank 3",
        "unidist: failed in consequence: rank 2 (PeerLostError)",
        "unidist: exit code 1",
    ]


def test_the_prefix_that_pytorch_puts_before_tracebacks_does_not_hide_them() -> None:
    tail = "".join(f"[rank1]: {line}\n" for line in PEER_LOST.splitlines())
    assert ended(1, 1, tail=tail).is_victim


def test_sigkill_is_explained() -> None:
    assert "out of memory" in report(ended(0, -9), [], "h")


def test_a_lost_host_is_told_once_with_its_ranks_and_is_to_blame_before_its_victims() -> None:
    lost = [RankExit(rank, 7, 1, 5, host_lost="host h2 was lost: it is silent") for rank in (2, 3)]
    victim = RankExit(0, 7, 1, 4, ("Traceback (most recent call last):", "unidist.errors.PeerLostError: rank 2"))
    told = RankExit(1, 7, -15, 6, signalled=True)
    exits = [victim, *lost, told]
    culprit = choose_culprit(exits)
    assert culprit is lost[0]
    assert report(culprit, exits, "h2").splitlines() == [
        "unidist: host h2 was lost: it is silent (ranks 2-3 ran there)",
        "unidist: ended by the launcher: rank 1",
        "unidist: failed in consequence: rank 0 (PeerLostError)",
        "unidist: exit code 1",
    ]


def test_a_host_that_is_lost_later_is_no_cause() -> None:
    first = RankExit(0, 7, 3, 1)
    later = RankExit(1, 7, 1, 2, host_lost="host h2 was lost: it is silent")
    assert choose_culprit([first, later]) is first
    assert "unidist: also failed: rank 1: host h2 was lost: it is silent" in report(first, [first, later], "h1")
