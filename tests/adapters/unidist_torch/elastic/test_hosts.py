"""Elastic jobs of PyTorch with `zero` over real ssh: a host that is lost takes no share with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ssh_hosts
from elastic_job import ElasticJob
from ssh_hosts import SshHosts

from tests.adapters.unidist_torch.elastic import test_generations
from tests.adapters.unidist_torch.elastic.test_generations import SCRIPT, parameters

pytestmark = [
    pytest.mark.soak,
    pytest.mark.parallel,
    pytest.mark.skipif(bool(ssh_hosts.why_not()), reason=ssh_hosts.why_not() or "hosts can be made"),
]
undisturbed = test_generations.undisturbed


@pytest.fixture(scope="module")
def hosts() -> Iterator[SshHosts]:
    with SshHosts(2) as made:
        yield made


def wait(condition: object, job: ElasticJob) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, job.lines
        time.sleep(0.02)


@pytest.mark.parametrize("lost", ["h1", "h2"])
def test_behind_a_cut_link_are_copies_of_what_the_other_host_has(
    hosts: SshHosts, lost: str, undisturbed: list[float], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    where = ["-H", "h1:2,h2:2", "--ssh-command", hosts.ssh_command]
    options = ["-np", "4", "--min-np", "2", *where, "--strategy", "zero=1"]
    with ElasticJob.start(tmp_path, options, ["script.py", "4", "zero=1"], {"UNIDIST_HEARTBEAT_SEC": "2"}) as job:
        job.wait_for(r"step 2 \d")  # at step 4 the script waits for four ranks
        hosts.link(lost, "down")
        try:
            wait(lambda: len(job.events("generation")) > 1, job)
            wait(lambda: not hosts.processes(lost), job)  # its side has ended itself
        finally:
            hosts.link(lost, "up")
        assert job.end(seconds=300) == 0, job.lines
    assert [event["world_size"] for event in job.events("generation")][:2] == [4, 2]
    assert not job.events("state_lost")
    found = [parameters(text) for (text,) in job.said(r"done (\S+) \d+ \d+")]
    assert len(found) == 4
    for each in found:
        assert each == pytest.approx(undisturbed, rel=1e-12, abs=1e-12)
