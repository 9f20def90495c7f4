"""What setup.cfg cannot say: packages in four roots, and the C extensions.

The extensions are optional. Without a C compiler the package still installs; the `shm` engine then
reports itself as unavailable with this reason, as does `tcp` (`unidist doctor` shows it), and `--engine
auto` says what it takes instead.
"""

import os
import sys
from glob import glob

from setuptools import Extension, find_packages, setup

ROOTS = (".", "adapters", "plugins", "launch")
KERNELS = "unidist/algorithms/native"


def extension(name, *folders, flags=()):
    """Return an extension of all C sources in these folders, compiled with these flags besides the usual ones."""
    return Extension(
        name,
        sources=sorted(source for folder in folders for source in glob(f"{folder}/*.c")),
        depends=sorted(header for folder in folders for header in glob(f"{folder}/*.h")),
        include_dirs=[KERNELS],
        extra_compile_args=["-O3", "-std=gnu11", "-fno-math-errno", "-fwrapv", "-Wall", "-Wextra", *flags],
        py_limited_api=True,
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        optional=True,
    )


def wheel_command():
    """Return the command that builds a wheel: one with no extension in it fits any machine, and its tag says so."""
    from setuptools.command.bdist_wheel import bdist_wheel

    class Wheel(bdist_wheel):
        def run(self):
            self.run_command("build_ext")  # first, since what was built decides the tag
            if not any(map(os.path.exists, self.get_finalized_command("build_ext").get_outputs())):
                self.distribution.ext_modules = []
                self.root_is_pure = True
            super().run()

    return Wheel


setup(
    # Older versions of setuptools, which have no such command, may still build in place.
    cmdclass={"bdist_wheel": wheel_command()} if "bdist_wheel" in sys.argv else {},
    packages=[package for root in ROOTS for package in find_packages(root, include=["unidist*"])],
    ext_modules=[
        extension("unidist.algorithms._kernels", KERNELS),
        extension("unidist.engines._shm", "unidist/engines/shm_native", KERNELS),
        extension("unidist_tcp._tcp", "plugins/unidist_tcp/native", KERNELS),
        extension("unidist_jax._handler", "adapters/unidist_jax/native"),
        extension("unidist_tensorflow._nodes", "adapters/unidist_tensorflow/native", KERNELS),
        extension(
            "unidist_parameter_server.native._shards",
            "plugins/unidist_parameter_server/native",
            flags=["-ffp-contract=off"],  # the bits of the numpy code
        ),
    ],
)
