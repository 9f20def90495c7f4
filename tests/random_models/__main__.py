"""Runs many random programs and prints a table: `python tests/random_models --framework torch --programs 700 --seed 1`.

`--program "Program(...)"` runs one again, as it was printed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]

import _model_programs  # noqa: E402 - from the folder above
from _random_runs import Outcome, Results, explore, judge, pools_for, table  # noqa: E402 - likewise


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python tests/random_models", description=__doc__)
    parser.add_argument("--framework", choices=("torch", "keras", "jax"), default="torch")
    parser.add_argument("--programs", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-shrinking", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print each program")
    parser.add_argument("--program", help="run this one alone")
    arguments = parser.parse_args()
    if arguments.program:
        program = eval(arguments.program, vars(_model_programs))
        pools = pools_for(program.framework)
        outcome = judge(pools, program)
        pools.close()
        print(outcome.kind, outcome.reason, outcome.text, sep="\n")
        return int(outcome.kind.is_defect)

    def tell(program: _model_programs.Program, outcome: Outcome) -> None:
        if arguments.verbose or outcome.kind.is_defect:
            print(outcome.kind, outcome.reason, outcome.text[-1500:], repr(program), sep=" | ", flush=True)

    pools, results = pools_for(arguments.framework), Results()
    try:
        explore(
            lambda program: judge(pools, program),
            importlib.import_module(f"_{arguments.framework}_random").VOCABULARY,
            count=arguments.programs,
            seed=arguments.seed,
            shrinks=not arguments.no_shrinking,
            tell=tell,
            results=results,
        )
    except KeyboardInterrupt:
        print("interrupted; so far:")
    finally:
        pools.close()
    print(table(arguments.framework, results))
    return int(bool(results.defects))


if __name__ == "__main__":
    sys.exit(main())
