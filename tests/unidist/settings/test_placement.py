"""Where a process stands: the contracts of the launchers."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest

from unidist.errors import ConfigurationError
from unidist.rendezvous import MeetingPlace
from unidist.settings.placement import ignored_tasks, read_placement
from unidist.topology import Topology

UNIDIST = {
    "UNIDIST_RANK": "5",
    "UNIDIST_WORLD_SIZE": "8",
    "UNIDIST_LOCAL_RANK": "1",
    "UNIDIST_LOCAL_WORLD_SIZE": "4",
    "UNIDIST_NODE_RANK": "1",
    "UNIDIST_NUM_NODES": "2",
    "UNIDIST_JOB_ID": "abc",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}
HOROVODRUN = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "8",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1",
    "HOROVOD_CROSS_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "77",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "9",
    "SLURM_STEP_ID": "0",
}
ENV = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("source", "env"),
    [
        ("unidist", UNIDIST),
        ("torchrun", TORCHRUN),
        ("horovodrun", HOROVODRUN),
        ("mpirun", OPEN_MPI),
        ("mpirun", MPICH),
        ("srun", SRUN),
        ("env://", ENV),
    ],
)
def test_every_launchers_variables_give_the_same_place(source: str, env: dict[str, str]) -> None:
    placement = read_placement(env)
    assert placement.source == source
    assert placement.topology == Topology(rank=5, world_size=8, local_rank=1, local_size=4, node_rank=1, num_nodes=2)
    assert placement.job_key


def test_without_a_launcher_there_is_one_process() -> None:
    placement = read_placement({})
    assert (placement.topology, placement.source, placement.secret) == (Topology(), "none", b"")


@pytest.mark.parametrize(
    ("env", "tasks"),
    [
        ({}, 0),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'}, 2),
        ({"TF_CONFIG": '{"cluster": {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]}}'}, 3),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, 0),
        ({"TF_CONFIG": "no JSON"}, 0),
        ({"TF_CONFIG": '["a"]'}, 0),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}', "RANK": "0", "WORLD_SIZE": "2"}, 0),
    ],
)
def test_tasks_of_tensorflow_that_no_launcher_has_started_are_counted(env: dict[str, str], tasks: int) -> None:
    assert ignored_tasks(env) == tasks


def test_a_slurm_allocation_without_a_step_of_several_tasks_is_one_process() -> None:
    assert read_placement({"SLURM_PROCID": "0", "SLURM_JOB_ID": "9"}).source == "none"
    assert read_placement({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}).source == "none"


def test_our_variables_win_over_those_that_the_launcher_exports_for_others() -> None:
    placement = read_placement(
        {**TORCHRUN, **HOROVODRUN, **SRUN, **UNIDIST, "UNIDIST_RANK": "6", "UNIDIST_LOCAL_RANK": "2"}
    )
    assert (placement.source, placement.topology.rank) == ("unidist", 6)


def test_jobs_have_different_keys() -> None:
    assert read_placement(UNIDIST).job_key != read_placement({**UNIDIST, "UNIDIST_JOB_ID": "abd"}).job_key
    assert read_placement(TORCHRUN).job_key != read_placement({**TORCHRUN, "MASTER_PORT": "2"}).job_key


def test_one_host_is_assumed_when_nothing_tells_local_sizes() -> None:
    topology = read_placement({"RANK": "3", "WORLD_SIZE": "4"}).topology
    assert topology == Topology(rank=3, world_size=4, local_rank=3, local_size=4)
    assert topology.single_host


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"UNIDIST_RANK": "0"}, "UNIDIST_WORLD_SIZE is not set"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, though other variables are set by env://"),
        ({**ENV, "RANK": "x"}, "RANK='x' is not a whole number"),
        ({**ENV, "RANK": "8"}, "rank=8 with world_size=8"),
        ({**ENV, "WORLD_SIZE": "0"}, "world_size=0"),
        ({**ENV, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0: a host has at least 1"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS='many'"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "?"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({**UNIDIST, "UNIDIST_SECRET_FD": "987"}, "UNIDIST_SECRET_FD=987 is not open"),
    ],
)
def test_what_contradicts_itself_is_a_configuration_error(env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_placement(env)


def test_the_secret_is_read_from_its_descriptor_and_from_no_other_file(tmp_path: Path) -> None:
    secret = secrets.token_bytes(32)
    descriptor = os.memfd_create("unidist-secret")
    try:
        os.write(descriptor, secret)
        assert read_placement({**UNIDIST, "UNIDIST_SECRET_FD": str(descriptor)}).secret == secret
    finally:
        os.close(descriptor)
    with open(tmp_path / "other", "w+b") as file, pytest.raises(ConfigurationError):
        read_placement({**UNIDIST, "UNIDIST_SECRET_FD": str(file.fileno())})


def test_a_job_on_several_hosts_is_told_where_to_meet() -> None:
    assert read_placement(UNIDIST).meeting_place is None
    env = {**UNIDIST, "UNIDIST_CONTROL_ADDRESS": "[fe80::1]:77", "UNIDIST_HOST_ADDRESS": "10.0.0.2"}
    place = MeetingPlace(("fe80::1", 77), "10.0.0.2", 3)
    assert read_placement({**env, "UNIDIST_GENERATION": "3"}).meeting_place == place
    for wrong in ("10.0.0.1", "10.0.0.1:x", ":77"):
        with pytest.raises(ConfigurationError, match="is not HOST:PORT"):
            read_placement({**env, "UNIDIST_CONTROL_ADDRESS": wrong})
