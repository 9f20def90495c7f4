"""The file by which `unidist top` finds a job: the address of its status page, for the job's user alone.

It is in the user's runtime folder (XDG_RUNTIME_DIR, else a private folder in the temporary one), or at the path that
--status-file gives.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import string
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from unidist.errors import ConfigurationError

_MIN_TOKEN = 16
_TOKEN_LETTERS = frozenset(string.ascii_letters + string.digits + "-_.")


@dataclass(frozen=True)
class StatusAddress:
    """Address of a job's status page.

    Args:
        url: of the page, without the token.
        token: that the server asks for.
        pid: of the launcher; 0: not known.
        command: what the job runs.
    """

    url: str
    token: str
    pid: int = 0
    command: tuple[str, ...] = ()

    @property
    def full_url(self) -> str:
        """What one opens in a browser."""
        return f"{self.url}?token={self.token}"


def runtime_folder() -> Path:
    """Return the folder of this user's files, made if there is none.

    Raises:
        ConfigurationError: there is something of that name which others may change.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and os.path.isdir(given):
        folder = Path(given) / "unidist"
    else:
        folder = Path(tempfile.gettempdir()) / f"unidist-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigurationError(
            f"{str(folder)!r} is no folder of yours alone (mode 700); remove it, or give --status-file another place"
        )
    return folder


def default_path() -> Path:
    """Return where the launcher that is this process writes its file."""
    return runtime_folder() / f"job-{os.getpid()}.json"


def write(path: Path, address: StatusAddress) -> None:
    """Write the file, at once and readable for its user alone.

    Raises:
        ConfigurationError: it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(address), file)
        draft.replace(path)
    except OSError as exc:
        raise ConfigurationError(f"--status-file {str(path)!r} cannot be written: {exc}") from exc


def remove(path: Path) -> None:
    """Remove the file, if it is still that of this process."""
    with contextlib.suppress(ConfigurationError, OSError):
        if read(path).pid == os.getpid():
            path.unlink()


def read(path: Path) -> StatusAddress:
    """Read a file that a launcher wrote.

    Raises:
        ConfigurationError: there is none, or it is something else.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return StatusAddress(str(fields["url"]), str(fields["token"]), int(fields["pid"]), tuple(fields["command"]))
    except OSError as exc:
        raise ConfigurationError(
            f"{str(path)!r} cannot be read: {exc.strerror}. It is there while a job with --status-port runs."
        ) from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigurationError(f"{str(path)!r} is no file of `unidist launch --status-port`") from exc


def running_jobs() -> list[StatusAddress]:
    """Return this user's jobs on this host that show their status; files of launchers that were killed are removed."""
    import psutil

    jobs = []
    for path in sorted(runtime_folder().glob("job-*.json")):
        try:
            address = read(path)
        except ConfigurationError:  # it ended this very moment
            continue
        if psutil.pid_exists(address.pid):
            jobs.append(address)
        else:
            path.unlink(missing_ok=True)
    return jobs


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigurationError: others may read the file, or what is in it is no token.
    """
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            text = file.read(4096).strip()
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"--status-token-file {str(path)!r} cannot be read: {exc}") from exc
    if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid not in (os.getuid(), 0):
        raise ConfigurationError(
            f"--status-token-file {str(path)!r}: others can read it, or it is another user's. chmod 600 it."
        )
    if len(text) < _MIN_TOKEN or not all(each in _TOKEN_LETTERS for each in text):
        raise ConfigurationError(
            f"--status-token-file {str(path)!r}: a token has at least {_MIN_TOKEN} letters, digits, '-', '_' or '.'; "
            "`openssl rand -hex 24` makes one."
        )
    return text
