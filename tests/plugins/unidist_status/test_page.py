"""The status page of a real elastic job: over HTTP as a program would use it, and in a browser as a person does."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from elastic_job import ElasticJob, script, total
from unidist_command import Command

from unidist_status import file as status_file
from unidist_status.file import StatusAddress

WAIT_SEC = 120.0
SLOW_RANK_1 = "if place.rank == 1 and not os.path.exists('fast'): time.sleep(0.3)"


class Seen:
    """A job and its page."""

    def __init__(self, job: ElasticJob, file: Path) -> None:
        self.job = job
        job.wait_for(r"step 5 .*")
        self.file = file
        self.address: StatusAddress = status_file.read(file)

    def ask(self, path: str, method: str = "GET") -> str:
        headers = {"Authorization": f"Bearer {self.address.token}"}
        request = urllib.request.Request(self.address.url + path, method=method, headers=headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return str(answer.read().decode())

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ask("status.json"))
        return found

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        """Wait until a condition holds while the job runs, and return what it returned."""
        deadline = time.monotonic() + WAIT_SEC
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{self.status()}\n" + "\n".join(self.job.lines)
            assert self.job.process.poll() is None, "\n".join(self.job.lines)
            time.sleep(0.05)
        return found

    def wait_for_recovery(self) -> dict[str, Any]:
        """Wait until three ranks train again after one was lost."""

        def recovered() -> dict[str, Any] | None:
            status = self.status()
            is_whole = status["world_size"] == 3 and status["generation"] >= 2
            return status if is_whole and status["recovery"]["is_complete"] else None

        found: dict[str, Any] = self.wait_for(recovered)
        return found


def launch(command: Command, *options: str, in_step: str = "pass", env: dict[str, str] | None = None) -> ElasticJob:
    name = command.script(script(in_step=in_step))
    events = command.folder / "events.jsonl"
    arguments = ["launch", "-np", "3", "--min-np", "1", "--status-port", "0", *options, "--event-log", str(events)]
    return ElasticJob(command.start(*arguments, sys.executable, name, "1000000", "0.02", env=env), events)


def end(seen: Seen, command: Command) -> None:
    """Let the job come to its end, and check that nothing was lost or counted twice."""
    (command.folder / "stop").touch()
    assert seen.job.end() == 0, seen.job.lines
    (steps,) = seen.job.steps()
    assert seen.job.totals() == {total(steps)}
    assert not seen.file.exists()


@pytest.mark.parallel
def test_a_program_sees_the_slow_rank_and_kills_it(command: Command) -> None:
    file = command.folder / "status.json"
    timeline = command.folder / "timeline.%r.json"
    # The replacement comes late enough for the others to train without it for a while.
    options = ("--status-file", str(file), "--timeline", str(timeline), "--blacklist-cooldown-range", "1", "2")
    with launch(command, *options, in_step=SLOW_RANK_1) as job:
        seen = Seen(job, file)
        slow = seen.wait_for(lambda: any(each["rank"] == 1 for each in job.events("straggler")) and seen.status())
        assert sorted(rank["rank"] for rank in slow["ranks"]) == [0, 1, 2]
        own = {rank["rank"]: rank["own_sec"] for rank in slow["ranks"]}
        assert own[1] >= 0.3
        (command.folder / "fast").touch()

        seen.ask("stacks/2", "POST")
        seen.wait_for(lambda: "most recent call first" in seen.ask("logs/2"))
        assert "most recent call first" not in seen.ask("logs/1")
        assert re.search(r"^step \d+ 1 ", seen.ask("logs/1"), re.MULTILINE)

        pid = next(rank["pid"] for rank in slow["ranks"] if rank["rank"] == 1)
        assert json.loads(seen.ask("kill/1", "POST")) == {"action": "kill", "worker": 1, "rank": 1}
        status = seen.wait_for_recovery()
        assert [(each["pid"], each["rank"]) for each in status["ended"]] == [(pid, 1)]
        assert pid not in {rank["pid"] for rank in status["ranks"]}
        if _has_prometheus():
            assert re.search(r'^unidist_recovery_seconds\{phase="restore"\} \d', seen.ask("metrics"), re.MULTILINE)
        end(seen, command)
    assert [event["rank"] for event in job.events("lost")] == [1]
    assert [(event["action"], event["rank"]) for event in job.events("asked")] == [("stacks", 2), ("kill", 1)]
    rows = json.loads((command.folder / "timeline.0.json").read_text())
    assert [row["name"] for row in rows if row["name"].startswith("RE")] == ["RE-FORM", "RESTORE"]
    assert sum(row["name"] == "FIRST_STEP" for row in rows) == 1
    first = job.events("recovered")[0]
    assert first["detect_sec"] is not None
    assert all(first[f"{phase}_sec"] >= 0 for phase in ("reform", "restore", "first_step"))
    assert sum(seen.address.full_url in line for line in job.lines) == 1
    assert sum(seen.address.token in line for line in job.lines) == 1


def _has_prometheus() -> bool:
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parallel
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_a_person_reads_the_page_and_presses_its_buttons(command: Command, tmp_path: Path) -> None:
    runtime = command.folder / "run"
    runtime.mkdir()
    rows = "[...document.querySelectorAll('#ranks tr')].map(row => [row.dataset.rank, row.dataset.pid])"
    with launch(command, env={"XDG_RUNTIME_DIR": str(runtime)}) as job:
        job.wait_for(r"step 1 .*")
        (file,) = (runtime / "unidist").iterdir()
        seen = Seen(job, file)
        with Browser(tmp_path / "browser") as browser:
            browser.open(seen.address.full_url)
            browser.wait_for(f"document.title.startsWith('3 ranks, training') && {rows}.length == 3")
            assert browser.value("location.search") == ""  # the token is not left where one can read it
            before = dict(browser.value(rows))
            assert {int(pid) for pid in before.values()} == {job.pid(rank, 3) for rank in range(3)}
            assert browser.value("[...document.querySelectorAll('th')].every(head => head.scope)")

            browser.wait_for("!document.querySelector('[aria-label=\"Stacks of rank 0\"]').disabled")
            browser.value("document.querySelector('[aria-label=\"Stacks of rank 0\"]').click()")
            browser.wait_for("document.querySelector('#log').textContent.includes('most recent call first')")

            # Once is a question; it is taken back after a while, so the answer comes in the same breath.
            kill = "const kill = document.querySelector('[aria-label=\"Kill rank 1\"]'); kill.click();"
            asked = browser.value(f"(() => {{ {kill} const text = kill.textContent; kill.click(); return text; }})()")
            assert asked == "Really kill?"
            browser.wait_for(
                f"{rows}.length == 3 && {rows}.every(([rank, pid]) => rank && pid != {before['1']}) && "
                "document.querySelector('#recovery').textContent.includes('first step in')"
            )
            browser.open(seen.address.url)  # again, without the token
            browser.wait_for("document.title.startsWith('3 ranks')")
            end(seen, command)
            browser.wait_for("document.querySelector('#notice').textContent.includes('the job has ended')")
    assert [event["rank"] for event in job.events("lost")] == [1]
