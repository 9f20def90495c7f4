"""The one thing setup.cfg cannot say: the C kernels of the shm engine.

The extension is optional. Without a C compiler the package still installs; the `shm` engine then
reports itself as unavailable with this reason (`unidist doctor` shows it) and `--engine auto` says what
it takes instead.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "unidist.engines._shm",
            sources=sorted(glob("unidist/engines/shm_native/*.c")),
            depends=sorted(glob("unidist/engines/shm_native/*.h")),
            extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno", "-fwrapv", "-Wall", "-Wextra"],
            py_limited_api=True,
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            optional=True,
        )
    ]
)
