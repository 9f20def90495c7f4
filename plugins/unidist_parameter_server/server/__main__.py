"""A server of a job of `unidist launch`: `python -m unidist_parameter_server.server`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from datetime import timedelta

from unidist.control import job_values
from unidist.errors import UnidistError
from unidist.settings import job_secret
from unidist_parameter_server.server.serving import ParameterServerProcess
from unidist_parameter_server.wire import claim_key, server_key

_LONGEST_WAIT = timedelta(seconds=60)


def main() -> None:
    """Serve until SIGTERM; exits with 2 and one line on standard error when it cannot."""
    number = int(os.environ.get("UNIDIST_ROLE_INDEX", "0"))
    host = os.environ.get("UNIDIST_HOST_ADDRESS") or "127.0.0.1"
    try:
        values = job_values()

        def address_of(server: int) -> tuple[str, int]:
            (found,) = values.wait([server_key(server)], _LONGEST_WAIT)
            address, port = json.loads(found)
            return str(address), int(port)

        def claim(segment: str) -> bool:
            own = str(number).encode()
            return values.claim(claim_key(segment), own) == own

        with ParameterServerProcess(
            number, host=host, secret=job_secret(), address_of=address_of, claim=claim
        ) as server:
            # The signal is for the main thread, which must not wait in `accept` for it.
            ended = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: ended.set())
            signal.signal(signal.SIGINT, lambda *_: ended.set())
            threading.Thread(target=server.run, daemon=True).start()
            values.set(server_key(number), json.dumps([host, server.address[1]]).encode())
            while not ended.wait(1.0):
                pass
        values.close()
    except UnidistError as exc:
        print(f"unidist: server {number}: {exc}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
