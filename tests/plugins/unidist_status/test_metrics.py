"""The answer to Prometheus, read by its own parser."""

from __future__ import annotations

import pytest

from unidist_status.model import JobStatus

pytest.importorskip("prometheus_client", reason="the package prometheus-client is not installed")


def samples(status: JobStatus, now: float) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    from prometheus_client.parser import text_string_to_metric_families

    from unidist_status import metrics as status_metrics

    text = status_metrics.text(status.as_fields(now=now)).decode()
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation for family in families)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_job_that_has_not_begun_has_metrics_too() -> None:
    found = samples(JobStatus(["x"], 2, now=0.0, time=0.0), 1.0)
    assert found["unidist_generation", ()] == -1
    assert found["unidist_world_size", ()] == 0


def test_ranks_events_and_recovery_are_labelled() -> None:
    status = JobStatus(["x"], 2, now=0.0, time=0.0)
    events = [
        ("host_joined", {"host": 'h"1\n', "index": 0, "address": "10.0.0.1", "cores": 8}),
        *[("started", {"worker": number, "host": 0}) for number in (0, 1)],
        *[("joined", {"worker": number, "host": 0}) for number in (0, 1)],
        ("generation", {"generation": 0, "world_size": 2, "progress": 0, "workers": [0, 1]}),
        ("change", {"generation": 0}),
        ("generation", {"generation": 1, "world_size": 2, "progress": 4, "workers": [1, 0]}),
    ]
    for now, (event, fields) in enumerate(events):
        status.happened(event, fields, now=float(now), time=float(now))
    for second in range(3):
        for number in (0, 1):
            told = {
                "generation": 1,
                "commits": second,
                "timed": second,
                "own_sec": 0.25 * second,
                "progress": 4 + second,
            }
            told |= {"restore_sec": 0.5, "first_step_sec": 0.125}
            status.beat(number, told, now=10.0 + second)
    found = samples(status, 12.0)
    assert found["unidist_generation", ()] == 1
    assert found["unidist_commits_total", ()] == 6
    assert found["unidist_world_changes_total", ()] == 1
    assert found["unidist_events_total", (("event", "generation"),)] == 2
    assert found["unidist_rank_own_seconds", (("host", 'h"1\n'), ("rank", "1"))] == 0.25
    assert found["unidist_recovery_seconds", (("phase", "reform"),)] == 1
    assert found["unidist_recovery_seconds", (("phase", "restore"),)] == 0.5
    assert found["unidist_straggler_rank", ()] == -1
