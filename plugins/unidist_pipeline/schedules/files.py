"""Schedules in YAML or JSON files (by file extension): to inspect, to edit by hand, to import from other programs.

    schedule: my-own                # a name for drawings
    microbatches: 2
    placement: [0, 1]               # the rank of each stage
    ranks:                          # what each rank does, in order; see `schedules.model` for the notation
      - 0F0 0F1 0B0 0B1
      - 1F0 1B0 1F1 1B1

Lists that only compute, as here, are completed with messages and exchanges of gradients; lists that have any of them
are taken as they are. Who is at the other end of a message follows from the placement.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unidist.errors import ConfigurationError, unknown_choice
from unidist_pipeline.schedules.builder import complete
from unidist_pipeline.schedules.model import (
    COMPUTE,
    Action,
    ActionKind,
    PipelineSize,
    Schedule,
    ScheduleError,
    parse_action,
)
from unidist_pipeline.schedules.validation import validate

_KEYS = ("schedule", "microbatches", "placement", "ranks")
_TOWARDS = {
    ActionKind.SEND_ACTIVATION: 1,
    ActionKind.RECEIVE_GRADIENT: 1,
    ActionKind.RECEIVE_ACTIVATION: -1,
    ActionKind.SEND_GRADIENT: -1,
}


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write a schedule with all its actions; raises ConfigurationError if the file cannot be written."""
    content = {
        "schedule": schedule.name,
        "microbatches": schedule.num_microbatches,
        "placement": list(schedule.placement),
        "ranks": [" ".join(map(str, actions)) for actions in schedule.ranks],
    }
    if _is_json(path):
        text = json.dumps(content, indent=1)
    else:
        import yaml

        text = yaml.safe_dump(content, sort_keys=False, width=2**31)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigurationError(f"the schedule cannot be written to {path}: {exc.strerror}.") from exc


def read_schedule(path: Path) -> Schedule:
    """Read a schedule and validate it.

    Raises:
        ConfigurationError: the file cannot be read, or is no schedule.
        ScheduleError: the schedule is invalid; the message names the file.
    """
    content = _load(path)
    try:
        return _from_content(content)
    except ScheduleError as exc:
        raise ScheduleError(f"{path}: {exc}", rank=exc.rank, stage=exc.stage, microbatch=exc.microbatch) from exc
    except ConfigurationError as exc:
        raise ConfigurationError(f"{path}: {exc}") from exc


def _load(path: Path) -> Any:
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if _is_json(path) else yaml.safe_load(text)
    except OSError as exc:
        raise ConfigurationError(f"the schedule {path} cannot be read: {exc.strerror}.") from exc
    except (ValueError, yaml.YAMLError) as exc:  # ValueError: no JSON, or no text
        raise ConfigurationError(f"{path} is not {'JSON' if _is_json(path) else 'YAML'}: {exc}") from exc


def _from_content(content: Any) -> Schedule:
    if not isinstance(content, dict):
        raise ConfigurationError(f"it holds {type(content).__name__}, not the keys {', '.join(_KEYS)}.")
    for key in content:
        if key not in _KEYS:
            raise unknown_choice("key", str(key), _KEYS)
    if missing := [key for key in _KEYS if key not in content]:
        raise ConfigurationError(f"it has no {', no '.join(missing)}.")
    name, num_microbatches, placement, lists = (content[key] for key in _KEYS)
    numbers = [num_microbatches, *(placement if isinstance(placement, list) else [None])]
    if not all(isinstance(number, int) for number in numbers):
        raise ConfigurationError("microbatches must be a number, and placement a list of ranks, one for each stage.")
    if not isinstance(lists, list) or not lists:
        raise ConfigurationError("ranks must be a list, with the actions of each rank.")
    ranks = [_actions(rank, actions, placement) for rank, actions in enumerate(lists)]
    if all(action.kind in COMPUTE for actions in ranks for action in actions):
        size = PipelineSize(len(ranks), num_microbatches)
        schedule = complete(str(name), size, placement, ranks)
    else:
        schedule = Schedule(str(name), num_microbatches, tuple(placement), tuple(map(tuple, ranks)))
    validate(schedule)
    return schedule


def _actions(rank: int, listed: Any, placement: list[int]) -> list[Action]:
    words = listed.split() if isinstance(listed, str) else listed
    if not isinstance(words, list):
        raise ConfigurationError(f"rank {rank}: its actions must be text or a list, not {type(words).__name__}.")
    actions = []
    for index, word in enumerate(words):
        try:
            action = parse_action(str(word))
        except ScheduleError as exc:
            raise ScheduleError(f"rank {rank}, action {index}: {exc}", rank=rank) from exc
        neighbour = action.stage + _TOWARDS.get(action.kind, 0)
        if action.kind in _TOWARDS and 0 <= neighbour < len(placement):
            action = action._replace(peer=placement[neighbour])
        actions.append(action)
    return actions


def _is_json(path: Path) -> bool:
    return path.suffix == ".json"
