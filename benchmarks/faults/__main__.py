"""Run a campaign of faults: `python -m benchmarks.faults --runs 50 --seed 1`."""

from __future__ import annotations

import sys
from collections import Counter

import click

from benchmarks.faults import plans
from benchmarks.faults.judge import Outcome, Verdict, run
from benchmarks.faults.plans import Plan, random_plan, smallest


@click.command()
@click.option("--runs", default=50, show_default=True, help="Number of runs, with seeds from --seed on.")
@click.option("--seed", default=0, show_default=True, help="Of the first run.")
@click.option("--job", "jobs", multiple=True, type=click.Choice([*plans.JOBS]), help="Only such jobs. Repeatable.")
@click.option("--plan", help='Run this plan again, as it was printed: "Plan(...)".')
def main(runs: int, seed: int, jobs: tuple[str, ...], plan: str | None) -> None:
    """Run random faults in real jobs and print how they ended; the exit code is 1 after a defect."""
    if plan is not None:
        outcome = run(eval(plan, vars(plans)))
        click.echo(f"{outcome.verdict}, {outcome.seconds:.1f} s\n{outcome.text}")
        sys.exit(int(outcome.is_defect))
    counts: Counter[tuple[str, Verdict]] = Counter()
    defects = []
    longest = 0.0
    for number in range(seed, seed + runs):
        made = random_plan(number, jobs=jobs or tuple(plans.JOBS))
        outcome = run(made)
        longest = max(longest, outcome.seconds)
        counts.update((f"{fault.kind} {fault.target}", outcome.verdict) for fault in made.faults[: outcome.num_met])
        counts[f"a job: {made.job}", outcome.verdict] += 1
        click.echo(f"seed {number}: {outcome.verdict} in {outcome.seconds:.1f} s: {made}")
        if outcome.is_defect:
            click.echo(outcome.text)
            defects.append((number, outcome, made))
    _print_table(counts)
    click.echo(f"{runs} runs, seeds {seed} to {seed + runs - 1}; the longest took {longest:.0f} s")
    for number, outcome, made in defects:
        click.echo(f"seed {number}: {outcome.verdict}; the shortest that fails: {_shortest(made, outcome)}")
    sys.exit(int(bool(defects)))


def _print_table(counts: Counter[tuple[str, Verdict]]) -> None:
    click.echo("fault".ljust(24) + "".join(verdict.name.lower().rjust(9) for verdict in Verdict))
    for fault in sorted({fault for fault, _ in counts}):
        click.echo(fault.ljust(24) + "".join(str(counts[fault, verdict]).rjust(9) for verdict in Verdict))


def _shortest(plan: Plan, outcome: Outcome) -> Plan:
    return smallest(plan, lambda shorter: run(shorter).verdict is outcome.verdict)


if __name__ == "__main__":
    main()
