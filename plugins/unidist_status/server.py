"""The web server of a job's status: a page, its data, logs and metrics, and two buttons. All behind the job's token.

    GET /               the page                    token in the address (`/?token=...`), or a cookie from there
    GET /status.json    what it shows               `Authorization: Bearer TOKEN`, or the token in the address
    GET /metrics        the same for Prometheus     as above
    GET /logs/RANK      last lines of a rank        as above
    POST /stacks/RANK   have it show its stacks     the header only: no other site's page can send it
    POST /kill/RANK     kill it                     as above

The cookie opens the page alone, which says nothing of the job by itself: a cookie of 127.0.0.1 goes to whatever server
listens on another port there. The page keeps the token for its tab and sends it in the header.

The server has a bounded number of threads; slow clients are cut off. The job never waits for a client.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import socketserver
import threading
import time
from abc import ABC, abstractmethod
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from io import BufferedIOBase
from typing import Any
from urllib.parse import parse_qs, urlsplit

from unidist.errors import ConfigurationError

MAX_CONNECTIONS = 16
READ_SEC = 5.0
"""Longest pause of a client ..."""
TOTAL_SEC = 15.0
"""... and longest time for a request as a whole, answer included."""
MAX_REQUEST_BYTES = 16 << 10

_POLL_SEC = 0.1
_log = logging.getLogger("unidist.status")


class Refused(Exception):
    """Raised when a request cannot be served.

    Args:
        status: the answer's code.
        text: why.
    """

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class StatusSource(ABC):
    """Source of the data that the server shows. Its methods are called by several threads at once."""

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Return the status as plain data."""

    @abstractmethod
    def log_of(self, name: str) -> list[str]:
        """Return the last lines of a rank ("3"), or of a worker ("w7").

        Raises:
            Refused: there is none of that name.
        """

    @abstractmethod
    def ask(self, action: str, name: str, client: str) -> dict[str, Any]:
        """Have something done to a rank: "kill" or "stacks". Returns at once, with what will be done to whom.

        Raises:
            Refused: there is none of that name, or it cannot be done to it.
        """


class StatusServer:
    """Serves from separate threads, from `start` until it is closed. Clients that come before wait.

    Args:
        source: what to show.
        token: what clients have to know.
        address: of an own interface to listen on.
        port: to listen on; 0: any that is free.

    Raises:
        ConfigurationError: it cannot listen there.
    """

    def __init__(self, source: StatusSource, token: str, *, address: str, port: int) -> None:
        try:
            self._server = _Server(address, port, source, token)
        except OSError as exc:
            raise ConfigurationError(
                f"--status-port {port}: cannot listen on {address}: {exc.strerror or exc}. Use another port, or 0 for "
                "any that is free; --status-address is an address of this host."
            ) from exc
        self.port: int = self._server.server_address[1]
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self.port}/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SEC,), name="unidist-status", daemon=True
        )

    def start(self) -> None:
        """Start to serve. Idempotent."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Cut all clients off and end the threads."""
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.close_all()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: str, port: int, source: StatusSource, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.source = source
        self.token = token.encode()
        self.page_key = hmac.digest(self.token, b"page", "sha256").hex()
        self.page = resources.files("unidist_status").joinpath("page/page.html").read_text(encoding="utf-8")
        self._connections: dict[socket.socket, float] = {}
        self._threads_of: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        super().__init__((address, port), _Handler)

    @property
    def cookie_name(self) -> str:
        """Ports of a host share cookies, so the name differs from job to job."""
        return f"unidist_page_{self.server_address[1]}"

    def server_bind(self) -> None:
        """Bind, without asking a name server who we are."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a new thread, unless there are too many."""
        with self._lock:
            thread = None
            if len(self._connections) < MAX_CONNECTIONS:
                self._connections[request] = time.monotonic()
                thread = threading.Thread(
                    target=self.process_request_thread, args=(request, client_address), name="unidist-status-client"
                )
                thread.daemon = True
                self._threads_of[request] = thread
        if thread is None:
            self.shutdown_request(request)
        else:
            thread.start()

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that is done with."""
        with self._lock:
            self._connections.pop(request, None)
            self._threads_of.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off those that have taken too long, however busily they send. Called several times a second."""
        now = time.monotonic()
        with self._lock:
            for request, began in self._connections.items():
                if now - began > TOTAL_SEC:
                    _cut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client went away, or broke the rules: no matter for the job's output."""
        _log.debug("status page: client %s", client_address, exc_info=True)

    def close_all(self) -> None:
        """Cut off who is there, and wait for the threads."""
        self.server_close()
        with self._lock:
            threads = list(self._threads_of.values())
            for request in self._connections:
                _cut(request)
        for thread in threads:
            thread.join(READ_SEC)


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _LimitedReader:
    """Reads lines of a request, which as a whole is small."""

    def __init__(self, file: BufferedIOBase) -> None:
        self._file = file
        self._left = MAX_REQUEST_BYTES

    def readline(self, size: int = -1) -> bytes:
        limit = self._left + 1
        line = self._file.readline(min(size, limit) if size >= 0 else limit)
        self._left -= len(line)
        if self._left < 0:
            raise ConnectionError(f"a request of more than {MAX_REQUEST_BYTES} bytes")
        return line

    def close(self) -> None:
        self._file.close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]  # no other makes these
    timeout = READ_SEC
    server_version = "unidist"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = _LimitedReader(self.rfile)  # type: ignore[assignment] # all that is used of a file

    def do_GET(self) -> None:
        """Answer a GET."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Answer a POST."""
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: standard error is the job's."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no proper request; called by the base class too."""
        text = message or HTTPStatus(code).phrase
        self.close_connection = True
        self._send(HTTPStatus(code), f"{text}\n".encode(errors="replace"), "text/plain; charset=utf-8")

    # Who may

    def _knows_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="surrogatepass"), self.server.token)

    def _has_header(self) -> bool:
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        return kind.lower() == "bearer" and self._knows_token(given.strip())

    def _has_address(self, query: str) -> bool:
        given = parse_qs(query, max_num_fields=10).get("token", [])
        return len(given) == 1 and self._knows_token(given[0])

    def _has_cookie(self) -> bool:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie_name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self.server.page_key.encode())

    # What is answered

    def _answer(self, find: Any) -> None:
        try:
            url = urlsplit(self.path)
            find(url.path, url.query)
        except Refused as exc:
            self.send_error(exc.status, str(exc))
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST, "this address cannot be read")

    def _get(self, path: str, query: str) -> None:
        is_page = path == "/"
        if not (self._has_header() or self._has_address(query) or (is_page and self._has_cookie())):
            raise Refused(
                HTTPStatus.UNAUTHORIZED, "open the address that `unidist launch` has printed; it has the token"
            )
        kind, _, name = path[1:].partition("/")
        if is_page:
            self._send_page()
        elif path == "/status.json":
            self._send_json(HTTPStatus.OK, self.server.source.status())
        elif path == "/metrics":
            self._send_metrics()
        elif kind == "logs" and name:
            text = "".join(f"{line}\n" for line in self.server.source.log_of(name))
            self._send(HTTPStatus.OK, text.encode(errors="replace"), "text/plain; charset=utf-8")
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "there are /, /status.json, /metrics and /logs/RANK")

    def _post(self, path: str, query: str) -> None:
        if not self._has_header():
            raise Refused(HTTPStatus.UNAUTHORIZED, "this needs the header `Authorization: Bearer TOKEN`")
        if self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "send no body")
        action, _, name = path[1:].partition("/")
        if action not in ("stacks", "kill") or not name:
            raise Refused(HTTPStatus.NOT_FOUND, "there are /stacks/RANK and /kill/RANK")
        client = str(self.client_address[0])
        self._send_json(HTTPStatus.ACCEPTED, self.server.source.ask(action, name, client))

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        cookie = f"{self.server.cookie_name}={self.server.page_key}; Path=/; HttpOnly; SameSite=Lax"
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        page = self.server.page.replace("NONCE", nonce).encode()
        headers = {"Set-Cookie": cookie, "Content-Security-Policy": policy}
        self._send(HTTPStatus.OK, page, "text/html; charset=utf-8", headers)

    def _send_metrics(self) -> None:
        try:
            from unidist_status import metrics as status_metrics
        except ImportError as exc:
            raise Refused(
                HTTPStatus.NOT_IMPLEMENTED, "needs the package prometheus-client: pip install prometheus-client"
            ) from exc
        self._send(HTTPStatus.OK, status_metrics.text(self.server.source.status()), status_metrics.CONTENT_TYPE)

    def _send_json(self, status: HTTPStatus, fields: dict[str, Any]) -> None:
        self._send(status, json.dumps(fields).encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        if status is HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
