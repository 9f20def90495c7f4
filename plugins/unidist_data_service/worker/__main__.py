"""`python -m unidist_data_service.worker`: a data worker of the job that the environment names."""

import sys

from unidist.errors import UnidistError
from unidist_data_service.worker.process import run_worker

if __name__ == "__main__":
    try:
        run_worker(joins="--joins" in sys.argv[1:])
    except UnidistError as exc:
        sys.exit(f"unidist: {exc}")
