"""A server of a job of `unidist launch`: `python -m unidist_parameter_server.server`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from datetime import timedelta

from unidist.control import KeyValues, job_values
from unidist.errors import UnidistError
from unidist.jobs import beat_for_launcher, run_program
from unidist.settings import job_secret
from unidist_parameter_server.server.serving import ParameterServerProcess
from unidist_parameter_server.wire import address_from, address_value, claim_key, failure_value, server_key

_LONGEST_WAIT = timedelta(seconds=60)


def main() -> None:
    """Serve until SIGTERM; exits with 2 and one line on standard error when it cannot."""
    beat_for_launcher()
    number = int(os.environ.get("UNIDIST_ROLE_INDEX", "0"))
    host = os.environ.get("UNIDIST_HOST_ADDRESS") or "127.0.0.1"
    values: KeyValues | None = None
    try:
        values = directory = job_values()

        def address_of(server: int) -> tuple[str, int]:
            (found,) = directory.wait([server_key(server)], _LONGEST_WAIT)
            return address_from(found)

        def claim(segment: str) -> bool:
            own = str(number).encode()
            return directory.claim(claim_key(segment), own) == own

        with ParameterServerProcess(
            number, host=host, secret=job_secret(), address_of=address_of, claim=claim
        ) as server:
            # The signal is for the main thread, which must not wait in `accept` for it.
            ended = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: ended.set())
            signal.signal(signal.SIGINT, lambda *_: ended.set())
            threading.Thread(target=server.run, daemon=True).start()
            directory.set(server_key(number), address_value(host, server.address[1]))
            while not ended.wait(1.0):
                pass
    except UnidistError as exc:
        print(f"unidist: server {number}: {exc}", file=sys.stderr, flush=True)
        if values is not None:
            with contextlib.suppress(UnidistError):
                values.set(server_key(number), failure_value(f"server {number}: {exc}"))
        sys.exit(2)
    finally:
        if values is not None:
            values.close()


if __name__ == "__main__":
    run_program(main)
