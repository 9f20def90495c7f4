"""Jobs over real ssh, on hosts that are network namespaces with an sshd of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rank_lines import rank_lines
from ssh_hosts import SshHosts, why_not

pytestmark = [pytest.mark.parallel, pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")]

HEARTBEAT_SEC = 3.0  # less than the default of 5, so that the tests are short


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(2) as made:
        yield made


class Launch:
    """Runs `unidist launch` over the test's hosts, in a folder of its own."""

    def __init__(self, folder: Path, hosts: SshHosts) -> None:
        self.folder = folder
        self.hosts = hosts

    def start(self, *options: str, script: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a script on 4 ranks of 2 hosts, unless the options say otherwise."""
        (self.folder / "script.py").write_text(
            "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(script)
        )
        usual = [] if "-H" in options else ["-np", "4", "-H", "h1:2,h2:2"]
        ssh = [] if "--ssh-command" in options else ["--ssh-command", self.hosts.ssh_command]
        return subprocess.Popen(
            [sys.executable, "-m", "unidist_launch", "launch", *usual, *ssh, *options, "script.py"],
            cwd=self.folder,
            env={**os.environ, "UNIDIST_HEARTBEAT_SEC": str(HEARTBEAT_SEC), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *options: str, script: str, env: dict[str, str] | None = None) -> tuple[int, list[str], str]:
        """The same to its end; returns the exit code, the lines on standard output, in order, and standard error."""
        with self.start(*options, script=script, env=env) as process:
            out, err = process.communicate(timeout=120)
        return process.returncode, sorted(out.splitlines()), err

    def wait_for(self, *names: str) -> None:
        """Wait until ranks have made these files."""
        assert wait_until(lambda: all((self.folder / name).exists() for name in names), 60), names

    def is_empty(self, *names: str) -> bool:
        """Return whether nothing but sshd runs on these hosts."""
        return not any(self.hosts.processes(name) for name in names)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def launch(tmp_path: Path, hosts: SshHosts) -> Launch:
    return Launch(tmp_path, hosts)


PLAIN_SSH = (
    "ssh -F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o IdentitiesOnly=yes"
)
WAIT = """
    open(f"ready{rank}", "w")
    for _ in range(3000): time.sleep(0.1)
"""


def test_ranks_run_where_they_should_and_reach_each_other_by_address(launch: Launch, hosts: SshHosts) -> None:
    code, lines, err = launch.run(
        script="""
            import socket
            print(socket.gethostname(), os.environ["LOCAL_RANK"], os.environ["UNIDIST_NODE_RANK"],
                  os.environ["MASTER_ADDR"], os.environ["UNIDIST_HOST_ADDRESS"])
        """
    )
    assert code == 0, err
    first, second = hosts.addresses
    assert lines == [
        f"[0] h1 0 0 {first} {first}",
        f"[1] h1 1 0 {first} {first}",
        f"[2] h2 0 1 {first} {second}",
        f"[3] h2 1 1 {first} {second}",
    ]
    assert wait_until(lambda: launch.is_empty("h1", "h2"), 60)


@pytest.mark.parametrize("when", ["from the start", "later"])
def test_hosts_that_do_not_reach_each_other_end_the_job_by_name(launch: Launch, hosts: SshHosts, when: str) -> None:
    if when == "from the start":
        hosts.part("h1", "h2")
    try:
        with launch.start(script=WAIT) as process:
            if when == "later":
                launch.wait_for("ready0", "ready3")
                time.sleep(0.5)  # the links are there, unless the machine is busy; the job ends in either case
                hosts.part("h1", "h2")
            _, err = process.communicate(timeout=60)
    finally:
        hosts.part("h1", "h2", apart=False)
    assert process.returncode == 1, err
    assert "unidist: hosts h2 and h1 do not reach each other, though the launcher reaches them: nothing was" in err
    assert "failed first" not in err
    assert wait_until(lambda: launch.is_empty("h1", "h2"), 60)


def test_this_host_may_be_one_of_them(launch: Launch, hosts: SshHosts) -> None:
    code, lines, err = launch.run(
        *("-np", "2", "-H", "localhost:1,h2:1"),
        script='print(os.environ["MASTER_ADDR"], os.environ["UNIDIST_HOST_ADDRESS"])',
    )
    assert code == 0, err
    assert lines == [f"[0] {hosts.gateway} {hosts.gateway}", f"[1] {hosts.gateway} {hosts.addresses[1]}"]


def test_training_over_hosts_gives_the_numbers_of_one_process(launch: Launch) -> None:
    pytest.importorskip("torch", reason="the script is PyTorch's")
    code, lines, err = launch.run(
        "--log-level",
        "info",
        script="""
            import torch
            import unidist.torch as ud

            def train(batches, model, optimizer):
                for x in batches:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
                return torch.cat([p.detach().flatten() for p in model.parameters()])

            def network():
                torch.manual_seed(0)
                return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()

            torch.manual_seed(1)
            data = torch.randn(6, 8, 5, dtype=torch.float64)
            model = network()
            alone = train(data, model, torch.optim.SGD(model.parameters(), lr=0.1))
            ud.init()
            assert (ud.size(), ud.local_size(), ud.cross_size()) == (4, 2, 2)
            model = network()
            model, optimizer = ud.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
            mine = [batch[2 * ud.rank() : 2 * ud.rank() + 2] for batch in data]
            together = train(mine, model, optimizer)
            print("difference below 1e-12:", bool((together - alone).abs().max() < 1e-12))
            model = network()
            left_out = train(mine, model, torch.optim.SGD(model.parameters(), lr=0.1))
            print("without exchange:", bool((left_out - alone).abs().max() > 1e-3))
            large = torch.arange(300_000, dtype=torch.float64) * (ud.rank() + 1)  # large enough for stages
            print("large sum:", bool((ud.allreduce(large, op=ud.Sum) == 10 * torch.arange(300_000)).all()))
            ud.shutdown()
        """,
    )
    assert code == 0, err
    for printed in rank_lines("\n".join(lines)).values():
        assert sorted(printed) == ["difference below 1e-12: True", "large sum: True", "without exchange: True"]
    assert "collectives are hierarchical: tcp between 2 hosts, shm inside, ranks 0-3" in err
    assert "engine tcp for host memory: the first choice for 4 rank(s) on 2 host(s)" in err


def test_usual_failures_of_ssh_are_told_in_words(launch: Launch, hosts: SshHosts, tmp_path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other_key"], check=True, timeout=60
    )
    two = ",".join(f"{address}:1" for address in hosts.addresses)
    port = ("--ssh-port", str(hosts.port))
    for options, meaning in (
        (("-np", "2", "-H", "h1:1,no-such-host.invalid:1"), "no host of this name is known here"),
        (("--ssh-port", "2"), "no ssh server listens there"),
        (
            ("-np", "2", "-H", two, "--ssh-command", PLAIN_SSH, *port, "-i", str(tmp_path / "other_key")),
            "ssh could not log in without a password",
        ),
        (("--network-interface", "no0"), "network interface no0 was asked for: host h"),
    ):
        code, _, err = launch.run(*options, script="open('ran', 'w')")
        assert code == 2, err
        assert meaning in err
    assert not (tmp_path / "ran").exists()
    assert wait_until(lambda: launch.is_empty("h1", "h2"), 60)


def test_port_key_and_interface_are_used(launch: Launch, hosts: SshHosts) -> None:
    first, second = hosts.addresses
    code, lines, err = launch.run(
        *("-np", "2", "-H", f"root@{first}:1,{second}:1", "--ssh-command", PLAIN_SSH),
        *("--ssh-port", str(hosts.port), "--ssh-identity-file", str(hosts.identity_file)),
        *("--network-interface", "no0,eth0"),
        script='print(os.environ["UNIDIST_HOST_ADDRESS"], os.environ["NCCL_SOCKET_IFNAME"])',
    )
    assert code == 0, err
    assert lines == [f"[0] {first} no0,eth0", f"[1] {second} no0,eth0"]


def test_a_silent_loss_of_a_host_is_found_and_both_sides_end(launch: Launch, hosts: SshHosts) -> None:
    with launch.start("--grace-period", "1", script=WAIT) as launcher:
        launch.wait_for("ready0", "ready3")
        hosts.link("h2", "down")
        try:
            _, err = launcher.communicate(timeout=60)
            assert launcher.returncode == 1, err
            assert "host h2 was lost: nothing was heard of it for" in err
            assert "(ranks 2-3 ran there)" in err
            assert wait_until(lambda: launch.is_empty("h1"), 60)
            # The other side hears nothing of the launcher, and ends its ranks by itself.
            assert wait_until(lambda: launch.is_empty("h2"), 60), hosts.processes("h2")
        finally:
            hosts.link("h2", "up")


@pytest.mark.soak
@pytest.mark.parametrize("cut", [("h2",), ("h1", "h2")], ids=["a host", "the way between two"])
def test_what_is_cut_ends_the_job_within_two_heartbeats(launch: Launch, hosts: SshHosts, cut: tuple[str, ...]) -> None:
    """On a machine that has nothing else to do; ranks that cannot be told get their grace period, a second."""

    def set_link(*, is_up: bool) -> None:
        if len(cut) == 2:
            hosts.part(*cut, apart=not is_up)
        else:
            hosts.link(cut[0], "up" if is_up else "down")

    with launch.start("--grace-period", "1", script=WAIT, env={"UNIDIST_HEARTBEAT_SEC": "1"}) as launcher:
        launch.wait_for("ready0", "ready3")
        time.sleep(0.5)  # the links are there
        try:
            set_link(is_up=False)
            begin = time.monotonic()
            _, err = launcher.communicate(timeout=60)
            seconds = time.monotonic() - begin
        finally:
            set_link(is_up=True)
        assert launcher.returncode == 1, err
        assert seconds < 2 * 1.0 + 1.0, err


def test_a_job_whose_hosts_and_launcher_are_frozen_for_a_while_goes_on(launch: Launch, hosts: SshHosts) -> None:
    script = """
        open(f"ready{rank}", "w")
        while not os.path.exists("end"): time.sleep(0.05)
    """
    with launch.start(script=script, env={"UNIDIST_HEARTBEAT_SEC": "1"}) as launcher:
        launch.wait_for("ready0", "ready3")
        here = psutil.Process(launcher.pid)
        frozen = [here, *here.children(recursive=True), *hosts.processes("h1"), *hosts.processes("h2")]
        for process in frozen:
            process.suspend()
        time.sleep(4.0)
        for process in frozen:
            process.resume()
        time.sleep(2.5)  # who would be taken for lost would be by now
        (launch.folder / "end").touch()
        _, err = launcher.communicate(timeout=60)
        assert launcher.returncode == 0, err


def test_nothing_is_left_on_any_host_after_kill_9_of_the_launcher(launch: Launch) -> None:
    with launch.start(script=WAIT) as launcher:
        launch.wait_for("ready0", "ready1", "ready2", "ready3")
        launcher.send_signal(signal.SIGKILL)
        launcher.communicate(timeout=60)
        assert wait_until(lambda: launch.is_empty("h1", "h2"), 60)


@pytest.mark.soak
def test_a_crash_of_a_host_is_told_at_once(launch: Launch, hosts: SshHosts) -> None:
    with launch.start("--grace-period", "1", script=WAIT, env={"UNIDIST_HEARTBEAT_SEC": "60"}) as launcher:
        launch.wait_for("ready0", "ready3")
        hosts.crash("h2")
        try:
            begin = time.monotonic()
            _, err = launcher.communicate(timeout=60)
            assert time.monotonic() - begin < 10
            assert launcher.returncode == 1, err
            assert "host h2 was lost: its connection ended" in err
            assert wait_until(lambda: launch.is_empty("h1"), 60)
        finally:
            hosts.restart("h2")


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["tcp", "gloo"])
def test_a_peer_behind_a_cut_link_is_a_lost_peer_for_engines_too(launch: Launch, hosts: SshHosts, engine: str) -> None:
    """No rank waits for the 30 minutes of --timeout: the launcher ends them."""
    pytest.importorskip("torch", reason="the script is PyTorch's")
    script = """
        import torch
        import unidist.torch as ud
        ud.init()
        x = torch.ones(1000)
        while True:
            ud.allreduce(x, name="x")
            open(f"ready{rank}", "w")
    """
    with launch.start("--grace-period", "1", "--engine", engine, script=script) as launcher:
        launch.wait_for("ready0", "ready3")
        hosts.link("h2", "down")
        try:
            begin = time.monotonic()
            _, err = launcher.communicate(timeout=90)
            assert launcher.returncode == 1, err
            assert "host h2 was lost" in err
            assert time.monotonic() - begin < 2 * HEARTBEAT_SEC + 5
        finally:
            hosts.link("h2", "up")


@pytest.mark.soak
def test_a_host_that_is_down_is_told_after_sshs_timeout(launch: Launch, hosts: SshHosts) -> None:
    hosts.link("h2", "down")
    try:
        code, _, err = launch.run(script="open('ran', 'w')")
    finally:
        hosts.link("h2", "up")
    assert code == 2
    assert "host h2: it does not answer" in err or "host h2: there is no way to it" in err
    assert not (launch.folder / "ran").exists()


def test_the_port_is_open_to_no_stranger(launch: Launch, hosts: SshHosts) -> None:
    script = """
        open(f"made{rank}", "w").write(os.environ["UNIDIST_CONTROL_ADDRESS"]); os.rename(f"made{rank}", f"ready{rank}")
        while not os.path.exists("go"): time.sleep(0.02)
    """
    with launch.start(script=script) as launcher:
        launch.wait_for("ready0", "ready3")
        host, _, port = (launch.folder / "ready3").read_text().rpartition(":")
        assert host == hosts.gateway
        with socket.create_connection((host, int(port)), timeout=60) as stranger:
            stranger.sendall(os.urandom(4096))
            stranger.settimeout(60)
            answer = b""
            while data := _received(stranger):
                answer += data
        assert len(answer) < 128, "a stranger gets a nonce, and nothing else"
        (launch.folder / "go").touch()
        _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, err


def _received(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(4096)
    except ConnectionResetError:
        return b""
