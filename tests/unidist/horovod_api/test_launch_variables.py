"""Rank and size from the environment, before `init()`."""

from __future__ import annotations

import pytest

from unidist.horovod_api.launch_variables import get_env_rank_and_size, is_exportable, is_kubeflow_mpi

NAMES = ("HOROVOD_RANK", "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "OMPI_MCA_plm_rsh_agent"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("rank", "size"), [NAMES[:2], NAMES[2:4], NAMES[4:]])
def test_rank_and_size_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    assert get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv(rank, "2")
    with pytest.raises(RuntimeError, match=f"{rank} and {size}"):
        get_env_rank_and_size()
    monkeypatch.setenv(size, "4")
    assert get_env_rank_and_size() == (2, 4)


def test_what_is_true_of_this_host_only_is_not_exportable() -> None:
    names = ["PATH", "CUDA_VISIBLE_DEVICES", "NVIDIA_CUDA_VISIBLE_DEVICES", "OLDPWD", "BASH_FUNC_x%%", "HOROVOD_RANK"]
    assert [name for name in names if is_exportable(name)] == ["PATH", "HOROVOD_RANK"]


def test_kubeflow_is_known_by_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_kubeflow_mpi()
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")
    assert is_kubeflow_mpi()
