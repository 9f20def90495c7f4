"""`init_process_group("unidist")` works in a script that imports nothing of unidist, whoever starts its processes."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ssh_hosts import SshHosts, why_not
from unidist_command import Command

pytest.importorskip("torch")

pytestmark = pytest.mark.parallel

SCRIPT = str(Path(__file__).parent / "_ddp_script.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def numbers(command: Command, words: list[str]) -> list[str]:
    """Run a command and return what its two ranks found."""
    with command.start_words(words, env={**os.environ, **ONE_THREAD}) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    number = r"-?0x[0-9a-f.]+p[+-]\d+"
    found = re.findall(f"{number} {number}", out)
    return found * (2 if out.startswith("[0-1]") else 1)  # the launcher joins equal lines


def torchrun(backend: str) -> list[str]:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    return [sys.executable, *words, SCRIPT, backend]


def test_distributed_data_parallel_is_bit_for_bit_that_of_gloo_under_every_launcher(
    command: Command, tmp_path: Path
) -> None:
    expected = numbers(command, torchrun("gloo"))
    assert len(expected) == 2
    launched = [sys.executable, "-m", "unidist_launch", "launch", "-np", "2", SCRIPT, "unidist"]
    alone = [sys.executable, SCRIPT, "unidist"]
    for words in (
        launched,
        torchrun("unidist"),
        [*alone, f"file://{tmp_path}/store"],
        [*alone, f"tcp://127.0.0.1:{free_port()}"],
    ):
        assert sorted(numbers(command, words)) == sorted(expected), words


def test_children_of_a_rank_form_a_group_of_their_own(command: Command, tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "unidist_launch",
        "launch",
        "-np",
        "1",
        SCRIPT,
        "unidist",
        f"file://{tmp_path}/store",
    ]
    assert len(numbers(command, words)) == 2


@pytest.mark.slow
def test_ranks_on_two_hosts_meet_without_a_launcher_of_ours(command: Command) -> None:
    """They have PyTorch's store and nothing else: it hands on the secret by which they know each other."""
    if reason := why_not():
        pytest.skip(reason)
    expected = numbers(command, torchrun("gloo"))
    with SshHosts(2) as hosts:
        meeting = {"MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500", "WORLD_SIZE": "2", **ONE_THREAD}
        ranks = []
        for rank, name in enumerate(hosts.names):
            variables = {**meeting, "RANK": str(rank), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            words = ["env", *(f"{key}={value}" for key, value in variables.items()), sys.executable, SCRIPT, "unidist"]
            ssh = [*shlex.split(hosts.ssh_command), name, shlex.join(words)]
            ranks.append(subprocess.Popen(ssh, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        try:
            told = [process.communicate(timeout=120) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    assert [out.removeprefix("unidist: ").strip() for out, _ in told] == expected, [err for _, err in told]
