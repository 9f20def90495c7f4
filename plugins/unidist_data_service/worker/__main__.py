"""`python -m unidist_data_service.worker`: a data worker of the job that the environment names."""

import sys

from unidist.errors import UnidistError
from unidist.jobs import beat_for_launcher, run_program
from unidist_data_service.worker.process import run_worker


def main() -> None:
    """Work to the end of the job; exits with one line on standard error when it cannot."""
    beat_for_launcher()
    try:
        run_worker(joins="--joins" in sys.argv[1:])
    except UnidistError as exc:
        sys.exit(f"unidist: {exc}")


if __name__ == "__main__":
    run_program(main)
