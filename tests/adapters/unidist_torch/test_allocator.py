import subprocess
import sys

import pytest

from unidist_torch.allocator import keep_freed_memory

FAULTS = """
import resource, sys, torch
from unidist_torch.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory({})
def step():
    tensors = [torch.ones(1 << 20) for _ in range(16)]  # 64 MB, all of it freed at the end
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode):
    result = subprocess.run(
        [sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, timeout=180, check=True
    )
    return int(result.stdout)


@pytest.mark.soak  # it measures, and starts Python up to eleven times
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults of glibc's malloc")
def test_freed_memory_is_not_faulted_in_again():
    # Without, it depends on what happens to lie at the end of the heap: sometimes nothing is given back.
    assert any(faults("leave") > 500 for _ in range(10))
    assert faults("keep") < 50


@pytest.mark.parametrize(
    "env",
    [{"MALLOC_TRIM_THRESHOLD_": "1"}, {"MALLOC_MMAP_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.check=3"}],
)
def test_the_users_own_setting_is_left_alone(env):
    assert not keep_freed_memory(env)
