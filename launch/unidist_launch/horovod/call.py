"""`horovod.run`: a function on all ranks of a job that `unidist horovodrun` starts."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unidist.errors import ConfigurationError, PeerLostError, RemoteError
from unidist.jobs.pool import dump_call
from unidist_launch.options import hosts as host_list

CALL, PATH, REPLIES = "call", "path.json", "reply."
"""Files in the folder by which a call and its results travel."""

_BOOT = (
    "import json, sys; "
    "sys.path += [each for each in json.load(open(sys.argv[1] + '/path.json')) if each not in sys.path]; "
    "from unidist_launch.horovod.{module} import main; main()"
)
_END_SEC = 20.0


class _Failure(NamedTuple):
    rank: int
    text: str
    remote_traceback: str
    cause: BaseException | None


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Run `func(*args, **kwargs)` on `num_proc` new processes and return the results in rank order.

    The arguments are those of `horovod.run` 0.28.1, and mean what the flags of `horovodrun` mean that are named after
    them (docs/horovod.md). `import horovod` means unidist in the processes. For several hosts the current folder must
    be one that they share: the function and its results travel in a folder that is made there.

    Args:
        func: any function, also a lambda, a closure or one of `__main__`. It calls `init()` itself.
        args: positional arguments.
        kwargs: keyword arguments.
        num_proc: number of ranks.
        min_num_proc: the fewest ranks; makes the job elastic, and the result as long.
        max_num_proc: the most ranks of an elastic job.
        slots: of hosts that the discovery script names without a number.
        reset_limit: how often the ranks of an elastic job may change.
        cooldown_range: seconds, shortest and longest, for which a slot that failed is left alone.
        hosts: "host1:2,host2:2". Default: this host.
        hostfile: a file of them.
        host_discovery_script: a command that prints them; makes the job elastic.
        start_timeout: seconds in which all ranks must call `init()`.
        ssh_port: of the hosts.
        ssh_identity_file: to log in with.
        disable_cache: always so.
        output_filename: folder for the output of the ranks.
        verbose: show what the launcher does.
        use_gloo: always so.
        use_mpi: a warning: MPI does not start the ranks.
        mpi_args: a warning, as `use_mpi`.
        network_interface: deprecated, as in Horovod: `network_interfaces` with commas.
        network_interfaces: to use.
        executable: the Python of the ranks. Default: this one.
        np: deprecated, as in Horovod: `num_proc`.
        min_np: deprecated: `min_num_proc`.
        max_np: deprecated: `max_num_proc`.

    Raises:
        ValueError: `hosts` with `hostfile`, or `use_gloo` with `use_mpi`.
        ConfigurationError: the job cannot be started; says why.
        RemoteError: the function raised, or a rank died; `__cause__` is the exception where it can be brought here.
    """
    num_proc = _renamed("np", np, "num_proc", num_proc)
    min_num_proc = _renamed("min_np", min_np, "min_num_proc", min_num_proc)
    max_num_proc = _renamed("max_np", max_np, "max_num_proc", max_num_proc)
    named = network_interface.split(",") if network_interface else None
    network_interfaces = _renamed("network_interface", named, "network_interfaces", network_interfaces)
    if hosts is not None and hostfile is not None:
        raise ValueError("give hosts or hostfile, not both")
    if use_gloo and use_mpi:
        raise ValueError("give use_gloo or use_mpi, not both")
    valued = {
        "-np": num_proc,
        "--min-np": min_num_proc,
        "--max-np": max_num_proc,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--host-discovery-script": host_discovery_script,
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--network-interfaces": ",".join(network_interfaces) if network_interfaces else None,
    }
    switches = {"--disable-cache": disable_cache, "--verbose": verbose, "--gloo": use_gloo, "--mpi": use_mpi}
    flags = [word for name, value in valued.items() if value is not None for word in (name, str(value))]
    flags += [name for name, value in switches.items() if value]
    flags += [f"--mpi-args={mpi_args}"] if mpi_args else []
    flags += ["--blacklist-cooldown-range", *map(str, cooldown_range)] if cooldown_range else []
    is_elastic = min_num_proc is not None or max_num_proc is not None or host_discovery_script is not None
    shared = Path.cwd() if _may_be_elsewhere(hosts, hostfile, host_discovery_script) else None
    with tempfile.TemporaryDirectory(prefix=".unidist-run-", dir=shared) as folder:
        (Path(folder) / CALL).write_bytes(dump_call(func, tuple(args), dict(kwargs or {})))
        (Path(folder) / PATH).write_text(json.dumps(sys.path), encoding="utf-8")
        command = [executable or sys.executable, "-u", "-c", _BOOT.format(module="rank"), folder]
        code, error = _launch(folder, [*flags, *command])
        results = _results(Path(folder), code, error, None if is_elastic else num_proc)
    return results if min_num_proc is None else results[:min_num_proc]


def _renamed(old_name: str, old: Any, name: str, value: Any) -> Any:
    if old is None:
        return value
    warnings.warn(f"{old_name} is deprecated, as in Horovod; use {name}", DeprecationWarning, stacklevel=3)
    return old


def _may_be_elsewhere(hosts: str | None, hostfile: str | None, script: str | None) -> bool:
    if hosts is not None:
        return not all(map(host_list.is_local, host_list.parse(hosts)))
    if hostfile is not None:
        return not all(map(host_list.is_local, host_list.read_hostfile(Path(hostfile))))
    return script is not None


def _launch(folder: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Run `unidist horovodrun` to its end, which a signal to this process brings about, too.

    Returns:
        Its exit code, and the error for which it started nothing; "" if it started the ranks.
    """
    command = [sys.executable, "-u", "-c", _BOOT.format(module="launcher"), folder, "horovodrun", *arguments]
    error: list[str] = []
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if error or line.startswith("unidist: error: "):
                    error.append(line.removeprefix("unidist: error: "))
                else:
                    sys.stderr.write(line)
            code = process.wait()
        except BaseException:
            process.terminate()
            try:
                process.wait(_END_SEC)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    return code, "".join(error).strip()


def _results(folder: Path, code: int, error: str, num_proc: int | None) -> list[Any]:
    """Return what the ranks returned; `num_proc`: how many there are, None if that may change."""
    results: dict[int, Any] = {}
    failures = []
    for file in sorted(folder.glob(f"{REPLIES}*")):
        rank, reply = pickle.loads(file.read_bytes())
        kind, *content = pickle.loads(reply)
        if kind == "value":
            results[rank] = content[0]
        else:
            text, trace, pickled = content
            failures.append(_Failure(rank, text, trace, None if pickled is None else pickle.loads(pickled)))
    if code and failures:
        # The first that failed by itself: the others lost a peer because of it.
        first = min(failures, key=lambda failure: isinstance(failure.cause, PeerLostError))
        raise RemoteError(
            f"rank {first.rank} raised {first.text}\non rank {first.rank}:\n{first.remote_traceback}",
            rank=first.rank,
            remote_traceback=first.remote_traceback,
        ) from first.cause
    if error:
        raise ConfigurationError(error)
    missing = [rank for rank in range(num_proc or 0) if rank not in results]
    if code or missing:
        rank = missing[0] if missing else 0
        raise RemoteError(
            f"the job ended with exit code {code}, and without a result of rank {rank}; its output above says why. "
            "(On several hosts the current folder must be one that all share.)",
            rank=rank,
            remote_traceback="",
        )
    return [results[rank] for rank in sorted(results)]
