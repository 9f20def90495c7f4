"""What setup.cfg cannot say: packages in four roots, and the C extensions.

The extensions are optional. Without a C compiler the package still installs; the `shm` engine then
reports itself as unavailable with this reason, as does `tcp` (`unidist doctor` shows it), and `--engine
auto` says what it takes instead.
"""

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


setup(
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
