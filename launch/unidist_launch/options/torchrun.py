"""Flags of torchrun, which people write by habit: each is refused with what to write instead."""

from __future__ import annotations

from typing import Any

import click

from unidist.errors import ConfigurationError

NUMBER_FLAGS = ("--nproc-per-node", "--nproc_per_node")
_HOSTS = "name all hosts by -H HOST:SLOTS,HOST:SLOTS, and start the job once, from one of them"
_MEETING = "leave it out; the ranks find each other without it"
_ADVICE = {
    NUMBER_FLAGS: "write -np {value}, the number of all processes, on all hosts together",
    ("--nnodes",): _HOSTS,
    ("--node-rank", "--node_rank"): _HOSTS,
    ("--master-addr", "--master_addr"): _MEETING,
    ("--master-port", "--master_port"): _MEETING,
    ("--rdzv-backend", "--rdzv_backend"): _MEETING,
    ("--rdzv-endpoint", "--rdzv_endpoint"): _MEETING,
    ("--rdzv-id", "--rdzv_id"): _MEETING,
    ("--max-restarts", "--max_restarts"): "write --min-np N, which makes the job elastic",
}


def refuse_flags(command: click.Command) -> None:
    """Give `command` a hidden option for each flag of torchrun that it does not have; using one is an error."""
    for names, advice in _ADVICE.items():
        command.params.append(
            click.Option([*names], hidden=True, expose_value=False, is_eager=True, callback=_refusal(advice))
        )


def _refusal(advice: str) -> Any:
    def refuse(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            text = advice.format(value=value if value.isdigit() else "N")
            raise ConfigurationError(f"{parameter.opts[0]} is an option of torchrun; {text}.")

    return refuse
