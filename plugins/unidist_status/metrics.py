"""A job's status for Prometheus, by its own client library. Imported when somebody asks for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_PHASES = ("detect", "reform", "restore", "first_step")
_RANK_LABELS = ("rank", "host")


def text(fields: dict[str, Any]) -> bytes:
    """Return the answer to `/metrics`.

    Args:
        fields: of `JobStatus.as_fields`.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Job(fields))
    return bytes(generate_latest(registry))


class _Job(Collector):
    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield from self._of_the_job()
        yield from self._of_the_ranks()
        yield from self._of_the_recovery()

    def _of_the_job(self) -> Iterable[Metric]:
        fields = self._fields
        for name, help_text, value in (
            ("generation", "Number of the world's membership; -1 before the first.", fields["generation"]),
            ("world_size", "Ranks of the present generation.", fields["world_size"]),
            ("processes", "Processes that run.", len(fields["ranks"])),
            ("commits_per_second", "Commits of the last seconds, per second.", fields["commits_per_sec"]),
            ("updates_per_second", "Updates of the optimizer, per second.", fields["updates_per_sec"]),
            ("steps_per_second", "Updates of a rank's optimizers, per second.", fields["steps_per_sec"]),
            ("samples_per_second", "Samples of all ranks, per second, where told.", fields["samples_per_sec"]),
            ("hosts_up", "Hosts that are there.", sum(host["state"] == "up" for host in fields["hosts"])),
            ("straggler_rank", "Rank that the others wait for; -1: none.", _rank(fields["straggler"])),
        ):
            yield GaugeMetricFamily(f"unidist_{name}", help_text, value)
        told = GaugeMetricFamily("unidist_value", "Values of the script: ud.report(loss=...).", labels=("name",))
        for name, value in fields["values"].items():
            told.add_metric((name,), float(value))
        yield told
        evaluated = GaugeMetricFamily("unidist_evaluation", "Values of the last checkpoint.", labels=("name",))
        for name, value in (fields["evaluation"] or {"values": {}})["values"].items():
            evaluated.add_metric((name,), value)
        yield evaluated
        yield CounterMetricFamily("unidist_commits", "Commits that the training has behind it.", fields["commits"])
        yield CounterMetricFamily("unidist_world_changes", "Changes of the world.", fields["num_changes"])
        events = CounterMetricFamily("unidist_events", "Events of the job's log.", labels=("event",))
        for name, number in sorted(fields["event_counts"].items()):
            events.add_metric((name,), number)
        yield events

    def _of_the_ranks(self) -> Iterable[Metric]:
        for name, help_text, key in (
            ("rank_own_seconds", "Seconds per commit in which a rank does not wait for others.", "own_sec"),
            ("rank_waited_seconds", "Seconds per commit in which it does.", "waited_sec"),
            ("rank_waiting_ratio", "Part of the last seconds in which a rank waited for others.", "waiting"),
            ("rank_reading_ratio", "Part of the last seconds in which a rank waited for its batches.", "reading"),
            ("rank_memory_bytes", "Resident memory of a rank's process.", "memory_bytes"),
            ("rank_heard_seconds", "Seconds since something was heard of it.", "heard_sec"),
        ):
            family = GaugeMetricFamily(f"unidist_{name}", help_text, labels=_RANK_LABELS)
            for rank in self._fields["ranks"]:
                if rank["rank"] is not None and rank["state"] in ("training", "leaving") and rank[key] is not None:
                    family.add_metric((str(rank["rank"]), rank["host"]), rank[key])
            yield family

    def _of_the_recovery(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "unidist_recovery_seconds", "Phases of the last change of the world.", labels=("phase",)
        )
        recovery = self._fields["recovery"] or {}
        for phase in _PHASES:
            if recovery.get(f"{phase}_sec") is not None:
                family.add_metric((phase,), recovery[f"{phase}_sec"])
        yield family


def _rank(straggler: dict[str, Any] | None) -> int:
    return -1 if straggler is None or straggler["rank"] is None else int(straggler["rank"])


__all__ = ["CONTENT_TYPE", "text"]
