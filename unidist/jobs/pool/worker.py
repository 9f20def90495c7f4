"""The program of one rank of a `RankPool`: takes calls from the socket that it inherited, one at a time.

    python -c "... from unidist.jobs.pool.worker import main; main()" FD

Nothing but that socket is ever unpickled; the parent is its only other end. The worker ends when the
parent closes it.
"""

from __future__ import annotations

import pickle
import pickletools
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

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
    """Run a call of `dump_call` and return the pickled reply; see `answer_of`."""

    def run() -> Any:
        function, args, kwargs = pickle.loads(call)
        return function(*args, **kwargs)

    return answer_of(run)


def answer_of(function: Callable[[], Any]) -> bytes:
    """Call a function and return the reply, for `Answers.take`.

    It is ("value", result), or ("error", title, traceback, pickled exception or None).
    """
    try:
        data: bytes = cloudpickle.dumps(("value", function()))
        return data
    except SystemExit:
        raise  # the rank ends with that code, as a script does, and the parent reports it
    except BaseException as exc:  # whatever the user's function raises goes to the parent
        return pickle.dumps(("error", _title(exc), _traceback(exc), _pickled(exc)))


def is_error(reply: bytes) -> bool:
    """Return whether a reply is that of a function that raised; what a function returned is not loaded."""
    kind = next(argument for _, argument, _ in pickletools.genops(reply) if isinstance(argument, str))
    return kind == "error"


def _title(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def _traceback(error: BaseException) -> str:
    # Without the first frames, which are ours.
    shown = error.__traceback__
    while shown is not None and shown.tb_next is not None and shown.tb_frame.f_code.co_filename == __file__:
        shown = shown.tb_next
    return "".join(traceback.format_exception(type(error), error, shown))


def _pickled(error: BaseException) -> bytes | None:
    try:
        data: bytes = cloudpickle.dumps(error)
        pickle.loads(data)
        return data
    except Exception:  # an exception need not survive pickling; its text always goes along
        return None
