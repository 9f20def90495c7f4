"""Messages to the user about an elastic job's events: a line if something changes, else nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unidist_launch.output.writer import Output

_ACTIONS = {"kill": "is killed", "stacks": "shows its stacks"}


def tell(output: Output, event: str, fields: Mapping[str, Any]) -> None:
    """Write the line of an event, if it has one."""
    text = event_line(event, fields)
    if text:
        output.message(f"unidist: {text}")


def event_line(event: str, fields: Mapping[str, Any]) -> str:
    """Return the line of an event; "" if it has none."""
    if event == "generation" and fields["generation"] > 0:
        size = fields["world_size"]
        ranks = "1 rank goes on" if size == 1 else f"{size} ranks go on"
        return f"generation {fields['generation']}: {ranks} from commit {fields['progress']}"
    if event == "lost":
        return f"rank {fields['rank']} of generation {fields['generation']} was lost: {fields['reason']}"
    if event == "hung":
        return f"rank {fields['rank']} hangs: {fields['reason']}. Its stacks follow if it can show them; it is replaced"
    if event == "standby" and fields.get("replica"):
        return (
            f"worker {fields['worker']}, which was rank {fields['rank']}, stands by: ranks train in whole replicas of "
            f"the model ({fields['replica']}), and its own is not complete"
        )
    if event == "standby":
        return f"worker {fields['worker']} stands by, to take the place of a rank that is lost"
    if event == "resumed":
        return f"this launcher goes on with the job of one that has died: {len(fields['workers'])} processes"
    if event == "recovered":
        return _recovered(fields)
    if event == "straggler":
        return (
            f"rank {fields['rank']} of generation {fields['generation']} is slow: it works {fields['own_sec']:.3f} s "
            f"per step, the others {fields['others_sec']:.3f} s, and wait for it"
        )
    if event == "asked":
        whom = f"worker {fields['worker']}" if fields["rank"] is None else f"rank {fields['rank']}"
        return f"{whom}: {_ACTIONS[fields['action']]}, as {fields['client']} has asked for on the status page"
    if event == "short" and fields.get("missing"):
        parts = ", ".join(map(str, fields["missing"]))
        return (
            f"{fields['waiting']} processes wait until there are whole replicas of the model ({fields['replica']}), "
            f"{fields['needed']} ranks at least: nobody is there for part {parts}"
        )
    if (
        event == "short" and not fields.get("replica") and fields["waiting"] < fields["needed"]
    ):  # else they wait for processes that are ending
        return f"{fields['waiting']} processes wait until there are {fields['needed']} (--min-np)"
    if event == "fallback":
        ranks = "1 rank" if fields["num_proc"] == 1 else f"{fields['num_proc']} ranks"
        return f"{fields['reason']}. The job begins again from its checkpoint, {ranks} with {fields['strategy']}"
    if event == "slot_given_up":
        return f"slot {fields['slot']} of host {fields['host']} is given up: {fields['failures']} failures in a row"
    if event == "hosts":
        listed = ", ".join(f"{name}:{slots}" for name, slots in fields["hosts"].items())
        return f"hosts are now {listed or 'none'}"
    if event in ("host_lost", "host_failed"):
        return f"host {fields['host']} {'was lost' if event == 'host_lost' else 'did not come'}: {fields['reason']}"
    if event == "host_terminating":
        return f"host {fields['host']} is taken back: its ranks leave at the next commit"
    if event == "checkpoint_loaded":
        why = f"; {fields['reason']}" if fields["reason"] else ""
        return f"the ranks go on from the checkpoint of commit {fields['commit']}, {fields['path']}{why}"
    if event == "evaluated":
        values = ", ".join(f"{name} {value:.6g}" for name, value in fields["values"].items())
        return f"checkpoint {fields['step']} is evaluated: {values}"
    if event == "left" and fields["rank"] is not None:
        return f"rank {fields['rank']} has left after commit {fields['progress']}, as it was asked to"
    return ""


def _recovered(fields: Mapping[str, Any]) -> str:
    detect, restore = fields["detect_sec"], fields["restore_sec"]
    phases = [
        *([] if detect is None else [f"noticed within {detect:.3f} s"]),
        f"formed anew in {fields['reform_sec']:.3f} s",
        *([] if restore is None else [f"restored in {restore:.3f} s"]),
        f"first step in {fields['first_step_sec']:.3f} s",
    ]
    return f"generation {fields['generation']} trains: {', '.join(phases)}"
