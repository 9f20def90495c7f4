"""Hosts for tests, on this machine: network namespaces with an address, a process tree and an sshd of their own.

They need root, the tools `ip` and `unshare`, and OpenSSH's server; `why_not` says what is missing. All that is made
carries a random name, and is removed by that name.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import slow_link

_SSHD = "/usr/sbin/sshd"
_PORT = 2222
_SO_RCVBUFFORCE = 33
_START_SEC = 60.0
_SSHD_CONFIG = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile {folder}/sshd.{name}.pid
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100:30:200
MaxSessions 100
UseDNS no
LogLevel ERROR
"""
_SSH_CONFIG = """
Host *
  Port {port}
  User root
  IdentityFile {folder}/id
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known_hosts
  LogLevel ERROR
  KexAlgorithms curve25519-sha256
"""


def why_not() -> str:
    """Return why such hosts cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "making hosts needs root, for network namespaces"
    missing = [tool for tool in ("ip", "unshare", "ssh", "ssh-keygen", _SSHD) if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: openssh-server, openssh-client, iproute2)"
    probe = f"udprobe{secrets.token_hex(2)}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True, timeout=60).returncode:
        return "network namespaces cannot be made here"
    subprocess.run(["ip", "netns", "delete", probe], check=True, timeout=60)
    return ""


class SshHosts:
    """Hosts `h1`, `h2`, ... A context manager; leaving it removes them and every process on them.

    Args:
        count: number of hosts.
        delay_ms: what a packet takes from one host to another; not 0 and `loss` need what `slow_link` does.
        loss: share of packets that are lost on this way.

    Attributes:
        names: of the hosts, as `-H` takes them.
        addresses: their IP addresses.
        ssh_command: an ssh that knows them all.
    """

    def __init__(self, count: int, *, delay_ms: float = 0.0, loss: float = 0.0) -> None:
        self._delay_ms, self._loss = delay_ms, loss
        self._links: list[subprocess.Popen[bytes]] = []
        self._mark = secrets.token_hex(2)
        self._bridge = f"ud{self._mark}b"
        self._net = _free_network()
        self._folder = Path(tempfile.mkdtemp(prefix="unidist-hosts-"))
        self._hosts: dict[str, subprocess.Popen[bytes]] = {}
        self.names = tuple(f"h{i + 1}" for i in range(count))
        self.addresses = tuple(f"{self._net}.{i + 1}" for i in range(count))
        self.gateway = f"{self._net}.254"
        self.port = _PORT
        self.ssh_command = f"ssh -F {self._folder}/ssh_config"
        self.identity_file = self._folder / "id"

    def link(self, name: str, state: str) -> None:
        """Take the network cable of a host out ("down") or put it in ("up"): no connection is told."""
        _run("ip", "link", "set", self._outer(name), state)

    def alias(self, name: str, alias: str) -> None:
        """Let all hosts know one of them by another name, too, as a cluster's DNS does."""
        with (self._folder / "hosts").open("a") as file:
            file.write(f"{self.addresses[self.names.index(name)]} {alias}\n")

    def narrow(self, name: str, *, mtu: int, rate: str) -> None:
        """Give a host a network card that takes short packets, and only so many bits in a second ("50mbit")."""
        for inside in ((), ("-n", self._space(name))):
            device = "eth0" if inside else self._outer(name)
            _run("ip", *inside, "link", "set", device, "mtu", str(mtu))
            shape = ("dev", device, "root", "tbf", "rate", rate, "burst", "10kb", "latency", "5ms")
            _run("tc", *inside, "qdisc", "replace", *shape)

    def part(self, first: str, second: str, *, apart: bool = True) -> None:
        """Take two hosts from each other, or give them back: what they send to each other is lost without a word."""
        for name, other in ((first, second), (second, first)):
            address = self.addresses[self.names.index(other)]
            nowhere = ("replace", address, "lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "eth0")
            _run("ip", "-n", self._space(name), "neigh", *(nowhere if apart else ("del", address, "dev", "eth0")))

    def crash(self, name: str) -> None:
        """Kill every process of a host at once."""
        unshare = psutil.Process(self._hosts[name].pid)
        for child in unshare.children():
            child.kill()  # the first process of its namespace: the kernel kills the rest
        self._hosts.pop(name).wait(60)

    def restart(self, name: str) -> None:
        """Start a crashed host again."""
        self._boot(name)
        self._await(name)

    def processes(self, name: str) -> list[psutil.Process]:
        """Return what runs on a host, apart from its sshd."""
        (first,) = psutil.Process(self._hosts[name].pid).children()
        space = os.readlink(f"/proc/{first.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            try:
                is_there = os.readlink(f"/proc/{process.pid}/ns/pid") == space and "sshd" not in process.name()
                if is_there and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def __enter__(self) -> Self:
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _build(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd demands it
        for key in ("id", "host_key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / key))
        shutil.copy(self._folder / "id.pub", self._folder / "authorized_keys")
        aliases = "".join(
            f"Host {name}\n  HostName {address}\n" for name, address in zip(self.names, self.addresses, strict=True)
        )
        (self._folder / "ssh_config").write_text(aliases + _SSH_CONFIG.format(port=_PORT, folder=self._folder))
        known = "".join(f"{address} {name}\n" for name, address in zip(self.names, self.addresses, strict=True))
        (self._folder / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for name, address in zip(self.names, self.addresses, strict=True):
            space, outer = self._space(name), self._outer(name)
            _run("ip", "netns", "add", space)
            if self._delay_ms or self._loss:
                self._make_slow_link(space, outer)
            else:
                _run("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", outer, "master", self._bridge, "up")
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            _run("ip", "-n", space, "link", "set", "lo", "up")
            config = _SSHD_CONFIG.format(port=_PORT, address=address, folder=self._folder, name=name)
            if os.environ.get("PYTHONPATH"):  # agents shall run the sources that are tested
                config += f"SetEnv PYTHONPATH={os.environ['PYTHONPATH']}\n"
            (self._folder / f"sshd.{name}.conf").write_text(config)
            self._boot(name)
        for name in self.names:
            self._await(name)

    def _make_slow_link(self, space: str, outer: str) -> None:
        """Each packet from host to host passes two of them."""
        numbers = (f"{self._delay_ms / 2}", f"{self._loss / 2}", str(len(self._links)))
        command = [sys.executable, slow_link.__file__, space, outer, *numbers]
        link = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        self._links.append(link)
        assert link.stdout is not None
        assert link.stdout.readline() == b"ready\n", "the link cannot be made"

    @contextmanager
    def overheard(self, name: str) -> Iterator[bytearray]:
        """Give all bytes that go over a host's link, once the block is left; for as long as it takes."""
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sock:  # 3: every protocol
            sock.bind((self._outer(name), 0))
            sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
            sock.settimeout(0.05)
            seen, has_ended = bytearray(), threading.Event()

            def listen() -> None:
                while True:
                    try:
                        seen.extend(sock.recv(1 << 17))
                    except TimeoutError:
                        if has_ended.is_set():
                            return

            thread = threading.Thread(target=listen)
            thread.start()
            try:
                yield seen
            finally:
                has_ended.set()
                thread.join()

    def _boot(self, name: str) -> None:
        inside = (
            f"hostname {name}; mount --bind {self._folder}/hosts /etc/hosts; mount -t tmpfs tmpfs /dev/shm; "
            f"exec {_SSHD} -D -e -f {self._folder}/sshd.{name}.conf"
        )
        spaces = ("--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child")
        with (self._folder / f"sshd.{name}.log").open("ab") as log:
            self._hosts[name] = subprocess.Popen(
                ["ip", "netns", "exec", self._space(name), "unshare", *spaces, "sh", "-c", inside],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _await(self, name: str) -> None:
        address = self.addresses[self.names.index(name)]
        deadline = time.monotonic() + _START_SEC
        while True:
            try:
                with socket.create_connection((address, _PORT), timeout=1):
                    return
            except OSError:
                log = (self._folder / f"sshd.{name}.log").read_text()
                assert time.monotonic() < deadline, f"sshd of {name} does not listen: {log}"
                time.sleep(0.02)

    def _remove(self) -> None:
        for process in self._hosts.values():
            os.killpg(process.pid, signal.SIGKILL)  # --kill-child takes all of the host along
            process.wait(60)
        self._hosts.clear()
        for link in self._links:
            link.kill()
            link.wait(60)
            assert link.stdout is not None
            link.stdout.close()
        for name in self.names:
            for command in (("link", "delete", self._outer(name)), ("netns", "delete", self._space(name))):
                subprocess.run(["ip", *command], capture_output=True, timeout=60)
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True, timeout=60)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _space(self, name: str) -> str:
        return f"ud{self._mark}{name}"

    def _outer(self, name: str) -> str:
        return f"ud{self._mark}{name}"


def _free_network() -> str:
    """Return the first three numbers of a /24 network that this machine does not use."""
    used = {str(item.address) for items in psutil.net_if_addrs().values() for item in items}
    for _ in range(100):
        net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        if not any(address.startswith(f"{net}.") for address in used):
            return net
    raise AssertionError("no free network")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
