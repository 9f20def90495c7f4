"""Runs random programs on ranks, and judges what comes out: the same numbers as one process, a refusal, or a defect."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any

import _trained
import numpy as np
from _model_programs import Program, Vocabulary, parts, programs
from _reasonable import REASONABLE
from _trained import Raised, Trained
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import HypothesisException
from part_pools import PartPools
from tensorflow_ranks import ENVIRONMENT

from unidist.errors import RemoteError, StalledError

LIMIT = 1e-9
"""Largest relative difference of a loss or a weight."""

_HANG = timedelta(seconds=90)
_WAITED = ("StalledError", "DeadlockError")
_QUIET = {"OMP_NUM_THREADS": "1", "UNIDIST_TIMEOUT_SEC": "30", "UNIDIST_LOG_LEVEL": "error"}
_VARIABLES: dict[str, dict[str, str]] = {
    "torch": _QUIET,
    "keras": {**ENVIRONMENT, **_QUIET, "KERAS_BACKEND": "tensorflow"},
    "jax": {**_QUIET, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
}


class Kind(StrEnum):
    """What can come of a program."""

    SAME = "same"
    REFUSED = "refused"
    UNLISTED = "refused for a reason that nobody has judged"
    WRONG = "wrong"
    CRASHED = "crashed"
    HUNG = "hung"
    UNSTABLE = "no test: the numbers of one process depend on how sums are rounded"
    INVALID = "no test: one process raises"

    @property
    def is_defect(self) -> bool:
        """Whether somebody has to look at it."""
        return self in (Kind.UNLISTED, Kind.WRONG, Kind.CRASHED, Kind.HUNG)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program.

    Args:
        kind: of it.
        reason: of a refusal the entry of the list; else what identifies a defect.
        text: for a reader.
    """

    kind: Kind
    reason: str = ""
    text: str = ""


def pools_for(framework: str) -> PartPools:
    """Return up to four ranks for a framework; close them in the end."""
    return PartPools(4, _VARIABLES[framework])


def judge(pools: PartPools, program: Program) -> Outcome:
    """Run a program in one process and on its ranks, and return the outcome."""
    try:
        [expected] = pools.get(1).run(_trained.alone, (program,), timeout=_HANG)
    except (RemoteError, StalledError) as error:
        return Outcome(Kind.INVALID, type(error).__name__, str(error))
    if isinstance(expected, Raised):
        return Outcome(Kind.INVALID, f"{expected.kind} {expected.text[:60]}", expected.trace)
    if not all(np.isfinite(piece.value).all() for piece in expected.pieces):
        return Outcome(Kind.UNSTABLE, "not finite")
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, job in enumerate(program.jobs):
            try:
                found = pools.get(job.ranks).run(_trained.on_rank, (program, number, folder), timeout=_HANG)
            except StalledError as error:
                return Outcome(Kind.HUNG, "the pool", str(error))
            except RemoteError as error:
                return Outcome(Kind.CRASHED, "a rank", str(error))
            if raised := [each for each in found if isinstance(each, Raised)]:
                outcome = _of_errors(raised, len(found))
                if outcome.kind not in (Kind.REFUSED, Kind.UNLISTED):
                    pools.close()  # its ranks may be in any state
                return outcome
            if any(each.losses != found[0].losses for each in found):
                return Outcome(Kind.WRONG, "losses differ between ranks", str([each.losses for each in found]))
            losses += found[0].losses
    differences = _differences(found, losses, expected)
    error = max(differences.values())
    if error <= LIMIT:
        return Outcome(Kind.SAME)
    rounding = 0.0
    for pieces in (2, 3, 4):
        [other] = pools.get(1).run(_trained.alone, (program,), {"pieces": pieces}, timeout=_HANG)
        rounding = max(rounding, *_differences([other], other.losses, expected).values())
    if not rounding < error / 1e3:
        return Outcome(Kind.UNSTABLE, "rounding", f"{rounding:.1e} alone, {error:.1e} on ranks")
    worst = sorted(differences, key=lambda name: -differences[name])[:6]
    return Outcome(Kind.WRONG, "", ", ".join(f"{name}: {differences[name]:.1e}" for name in worst))


def _of_errors(raised: Sequence[Raised], ranks: int) -> Outcome:
    first = min(raised, key=lambda each: each.kind == "PeerLostError")
    others = f" ({len(raised)} of {ranks} ranks raised: {sorted({each.kind for each in raised})})"
    text = f"{first.kind}: {first.text}{others}"
    if first.says_so and first.updates == 0:
        for reason, pattern in REASONABLE.items():
            if re.search(pattern, first.text, re.DOTALL):
                return Outcome(Kind.REFUSED, reason, text)
        return Outcome(Kind.UNLISTED, _skeleton(first.text), text)
    kind = Kind.WRONG if first.kind == "MismatchError" else Kind.HUNG if first.kind in _WAITED else Kind.CRASHED
    return Outcome(kind, f"{first.kind} {first.place}", f"{text}\n{first.trace}")


def _skeleton(text: str) -> str:
    """Return a text without numbers and names, which differ between programs."""
    return re.sub(r"[\d.]+|'[^']*'|\"[^\"]*\"|\w*_\w+", "#", text)[:80]


def _differences(found: Sequence[Trained], losses: Sequence[float], expected: Trained) -> dict[str, float]:
    """Return the largest relative difference of the losses and of each parameter, which is infinite where one lacks."""
    wanted = {piece.name: piece.value for piece in expected.pieces}
    covered = {name: np.zeros(value.shape, bool) for name, value in wanted.items()}
    errors = {"losses": _error(np.array(losses), np.array(expected.losses))}
    for piece in (piece for each in found for piece in each.pieces):
        if piece.name not in wanted:
            errors[piece.name] = np.inf
            continue
        whole = wanted[piece.name]
        place = np.ix_(*piece.indices) if piece.indices else ...
        errors[piece.name] = max(errors.get(piece.name, 0.0), _error(piece.value, whole[place]))
        covered[piece.name][place] = True
    return errors | {name: np.inf for name, is_there in covered.items() if not is_there.all()}


def _error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not found.size:
        return 0.0
    error = float(np.max(np.abs(found - expected)) / max(1.0, np.max(np.abs(expected))))
    return error if np.isfinite(error) else float("inf")


# Many programs


@dataclass(frozen=True)
class Defect:
    """A failing program, and the smallest one that fails in the same way."""

    outcome: Outcome
    smallest: Program

    def explains(self, outcome: Outcome, program: Program) -> bool:
        """Return whether another failure may be this one again."""
        if (outcome.kind, outcome.reason) != (self.outcome.kind, self.outcome.reason):
            return False
        return bool(outcome.reason) or set(parts(self.smallest)) <= set(parts(program))


@dataclass
class Results:
    """The outcomes of programs, by kind and reason, and the defects among them."""

    counts: dict[tuple[Kind, str], int] = field(default_factory=dict)
    defects: list[Defect] = field(default_factory=list)


def explore(
    judge: Callable[[Program], Outcome],
    vocabulary: Vocabulary,
    *,
    count: int,
    seed: int,
    shrinks: bool = True,
    tell: Callable[[Program, Outcome], None] = lambda program, outcome: None,
    results: Results | None = None,
) -> Results:
    """Run random programs; hypothesis shrinks each failing one that no earlier failure explains.

    Args:
        judge: returns the outcome of a program.
        vocabulary: of the framework.
        count: number of programs, those not counted that hypothesis tries in shrinking.
        seed: other programs with each.
        shrinks: let hypothesis look for smaller ones.
        tell: called with each program that counts.
        results: to add to, which somebody reads who interrupts this; default: new ones.
    """
    results = Results() if results is None else results
    judge = functools.cache(judge)
    seen = set[Program]()  # hypothesis begins each search with the same simple programs

    def count_one(program: Program, outcome: Outcome) -> None:
        if program in seen:
            return
        seen.add(program)
        key = outcome.kind, outcome.reason
        results.counts[key] = results.counts.get(key, 0) + 1
        tell(program, outcome)

    attempts = 5  # hypothesis may have no more programs
    while attempts and (left := count - sum(results.counts.values())) > 0:
        options = settings(
            max_examples=left + 1,
            phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
            database=None,
            deadline=None,
            derandomize=False,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
        )
        hunt = _Hunt(judge, results.defects, count_one)
        try:
            hunt.run(seeded(seed + 1_000_003 * left), options, given(programs(vocabulary).filter(vocabulary.sensible)))
        except (AssertionError, HypothesisException, ExceptionGroup):
            results.defects.append(Defect(hunt.failures[-1][1], hunt.failures[-1][0]))
        else:
            attempts -= 1
    return results


class _Hunt:
    """Fails for the first defect that is new, and from then on for that one only, so that hypothesis makes it smaller.

    Args:
        judge: see `explore`.
        known: defects that are not new.
        count: is told of the programs up to that first one.
    """

    def __init__(
        self,
        judge: Callable[[Program], Outcome],
        known: Sequence[Defect],
        count: Callable[[Program, Outcome], None],
    ) -> None:
        self.failures: list[tuple[Program, Outcome]] = []
        self._judge, self._known, self._count = judge, known, count

    def run(self, *decorators: Callable[[Any], Any]) -> None:
        """Let hypothesis call this with programs, and raise what it raises."""

        def test(program: Program) -> None:
            self._run_one(program)

        for decorator in reversed(decorators):
            test = decorator(test)
        test()  # type: ignore[call-arg]

    def _run_one(self, program: Program) -> None:
        outcome = self._judge(program)
        if not self.failures:
            self._count(program, outcome)
        elif (outcome.kind, outcome.reason) != (self.failures[0][1].kind, self.failures[0][1].reason):
            return
        if outcome.kind.is_defect and not any(defect.explains(outcome, program) for defect in self._known):
            self.failures.append((program, outcome))
            raise AssertionError(outcome.text)


def table(framework: str, results: Results) -> str:
    """Return the counts and the failing programs in words."""
    total = sum(results.counts.values())
    lines = [f"{framework}: {total} programs"]
    for kind in Kind:
        of_kind = {reason: count for (each, reason), count in results.counts.items() if each is kind}
        if of_kind:
            lines.append(f"  {sum(of_kind.values()):5} {kind}")
            lines += [
                f"        {count:5} {reason}"
                for reason, count in sorted(of_kind.items(), key=lambda x: -x[1])
                if reason
            ]
    for defect in results.defects:
        lines += ["", f"{defect.outcome.kind}: {defect.outcome.text}", f"  {defect.smallest!r}"]
    return "\n".join(lines)


def check_many(framework: str, vocabulary: Vocabulary, *, count: int = 300, seed: int = 2) -> None:
    """Raise AssertionError, with the smallest failing programs, unless many programs have no defect."""
    pools = pools_for(framework)
    try:
        results = explore(lambda program: judge(pools, program), vocabulary, count=count, seed=seed)
    finally:
        pools.close()
    print(table(framework, results))
    assert not results.defects, table(framework, results)
