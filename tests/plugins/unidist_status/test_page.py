"""The status page of real jobs: over HTTP as a program would use it, and in a browser as a person does."""

from __future__ import annotations

import json
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
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

    def __init__(self, job: ElasticJob, file: Path, *, first: str | None = r"step 5 .*") -> None:
        self.job = job
        if first is not None:
            job.wait_for(first)
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


TRAINING = """
import unidist.torch as ud, torch
ud.init()
model = torch.nn.Linear(8, 1)
step = ud.TrainStep(model, torch.optim.SGD(model.parameters(), 0.05), torch.nn.functional.mse_loss)
while True:
    x = torch.randn(16, 8)
    time.sleep(0.05 if rank == 1 else 0.01)
    loss = step(x, x.sum(1, keepdim=True))
    ud.report(accuracy=torch.tensor([0.5 + rank / 4]), samples=0)
    if ud.allreduce(torch.tensor(float(os.path.exists("stop"))), name="stop") > 0:
        break
"""


def watched(command: Command, *options: str) -> Iterator[Seen]:
    """Run a job whose ranks do not change, and end it."""
    file = command.folder / "status.json"
    arguments = ["launch", "-np", "2", "--status-port", "0", "--status-file", str(file), *options]
    with ElasticJob(command.start(*arguments, command.script(TRAINING)), command.folder / "none") as job:
        deadline = time.monotonic() + WAIT_SEC
        while not file.exists():
            assert job.process.poll() is None, "\n".join(job.lines)
            assert time.monotonic() < deadline, "\n".join(job.lines)
            time.sleep(0.05)
        seen = Seen(job, file, first=None)
        seen.wait_for(lambda: len(seen.status()["history"]) >= 3)
        yield seen
        (command.folder / "stop").touch()
        assert job.end() == 0, job.lines
        assert not file.exists()


@pytest.fixture
def fixed_job(command: Command) -> Iterator[Seen]:
    yield from watched(command)


@pytest.mark.parallel
def test_a_job_whose_ranks_do_not_change_shows_its_steps_samples_values_waiting_and_memory(fixed_job: Seen) -> None:
    def steps_and_samples_agree() -> dict[str, Any] | None:
        status = fixed_job.status()
        samples = pytest.approx(32 * status["steps_per_sec"], rel=0.3)  # each rank has told its own at another moment
        return status if status["steps_per_sec"] and status["samples_per_sec"] == samples else None

    status = fixed_job.wait_for(steps_and_samples_agree)
    assert (status["title"], status["is_elastic"], status["state"]) == ("script.py", False, "training")
    assert status["steps_per_sec"] < 20  # rank 1 sleeps for a 20th of a second in each
    assert status["values"]["accuracy"] == pytest.approx(0.625)
    assert set(status["values"]) == {"accuracy", "loss"}
    fixed_job.wait_for(lambda: _waiting(fixed_job, 0) > _waiting(fixed_job, 1))  # rank 1 is the slow one
    assert all(rank["memory_bytes"] > 50e6 for rank in status["ranks"])
    assert all(point["values"].keys() <= {"accuracy", "loss"} for point in status["history"])
    if _has_prometheus():
        assert re.search(r'^unidist_value\{name="accuracy"\} 0.625', fixed_job.ask("metrics"), re.MULTILINE)
    fixed_job.ask("stacks/1", "POST")
    fixed_job.wait_for(lambda: "most recent call first" in fixed_job.ask("logs/1"))
    assert "most recent call first" not in fixed_job.ask("logs/0")


def _waiting(seen: Seen, rank: int) -> float:
    (found,) = [each["waiting"] for each in seen.status()["ranks"] if each["rank"] == rank]
    return float(found)


@pytest.mark.parallel
def test_agents_pass_on_the_progress_of_their_ranks(command: Command) -> None:
    for seen in watched(command, "--launcher", "ssh", "-H", "localhost:2"):
        status = seen.wait_for(lambda seen=seen: seen.status() if seen.status()["steps_per_sec"] > 0 else None)
        assert [rank["rank"] for rank in status["ranks"]] == [0, 1]
        assert status["hosts"][0]["processes"] == 2


@pytest.mark.parallel
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_the_page_is_readable_on_a_phone_and_on_a_desk_light_and_dark(fixed_job: Seen, tmp_path: Path) -> None:
    with Browser(tmp_path / "browser") as browser:
        browser.open(fixed_job.address.full_url)
        browser.wait_for("document.querySelectorAll('figure polyline').length >= 7")
        assert browser.value("document.title") == "script.py: 2 ranks, training \N{EN DASH} unidist"
        titles = browser.value("[...document.querySelectorAll('figcaption')].map(each => each.firstChild.textContent)")
        assert titles[:2] == ["Steps per second", "Samples per second"]
        assert {"accuracy", "loss", "Waiting for other ranks", "Memory of the largest rank"} == set(titles[2:])
        colors = {}
        for width in (420, 1100):
            for is_dark in (False, True):
                picture = tmp_path / f"page-{width}-{'dark' if is_dark else 'light'}.png"
                browser.screenshot(picture, width=width, height=1000, is_dark=is_dark)
                assert picture.read_bytes().startswith(b"\x89PNG")
                # Nothing is cut off at the right, and nothing is smaller than one can read.
                assert browser.value("document.documentElement.scrollWidth") <= width
                assert browser.value(
                    "[...document.querySelectorAll('figure, dl div, td, th')].filter(each => each.offsetWidth)"
                    ".every(each => each.getBoundingClientRect().right <= innerWidth + 1)"
                )
                sizes = (
                    "[...document.querySelectorAll('body *')].map(each => parseFloat(getComputedStyle(each).fontSize))"
                )
                assert browser.value(f"Math.min(...{sizes})") >= 11
                colors[width, is_dark] = browser.value("getComputedStyle(document.body).backgroundColor")
        assert colors[420, False] == colors[1100, False] == "rgb(255, 255, 255)"
        assert colors[420, True] == colors[1100, True] != colors[420, False]


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
            browser.wait_for(f"document.title.includes(': 3 ranks, training') && {rows}.length == 3")
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
            browser.wait_for("document.title.includes(': 3 ranks')")
            end(seen, command)
            browser.wait_for("document.querySelector('#notice').textContent.includes('the job has ended')")
    assert [event["rank"] for event in job.events("lost")] == [1]
