"""The program of one rank of a `RankPool`: takes calls from the socket that it inherited, one at a time.

    python -c "... from unidist.jobs.pool.worker import main; main()" FD

Nothing but that socket is ever unpickled; the parent is its only other end. The worker ends when the
parent closes it.
"""

from __future__ import annotations

import pickle
import socket
import sys
import traceback

import cloudpickle

from unidist.jobs.pool._channel import receive, send


def main() -> None:
    """Serve until the parent closes the socket, whose descriptor is the first argument."""
    connection = socket.socket(fileno=int(sys.argv.pop(1)))
    connection.set_inheritable(False)
    search_path = receive(connection)
    if search_path is None:
        return
    sys.path[:] = pickle.loads(search_path)
    while (call := receive(connection)) is not None:
        reply = answer(call)
        try:
            send(connection, reply)
        except BrokenPipeError:  # the parent has given this pool up
            return


def answer(call: bytes) -> bytes:
    """Run a call of `dump_call` and return the pickled reply.

    It is ("value", result), or ("error", title, traceback, pickled exception or None).
    """
    try:
        function, args, kwargs = pickle.loads(call)
        data: bytes = cloudpickle.dumps(("value", function(*args, **kwargs)))
        return data
    except SystemExit:
        raise  # the rank ends with that code, as a script does, and the parent reports it
    except BaseException as exc:  # whatever the user's function raises goes to the parent
        return pickle.dumps(("error", _title(exc), _traceback(exc), _pickled(exc)))


def _title(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _traceback(error: BaseException) -> str:
    # Without the first frame, which is ours.
    trace = error.__traceback__
    shown = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    return "".join(traceback.format_exception(type(error), error, shown))


def _pickled(error: BaseException) -> bytes | None:
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:  # an exception need not survive pickling; its text always goes along
        return None
