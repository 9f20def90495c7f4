"""The choice among Horovod's bindings: that of an installed framework, the same one on all ranks."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from unidist.communicator import format_ranks
from unidist.errors import ConfigurationError
from unidist.horovod_imports import real_horovod, real_module
from unidist.rendezvous import Rendezvous
from unidist.settings.environment import Settings
from unidist_horovod.bindings.interface import HorovodBinding

HOW = "`unidist build horovod` builds and installs it"
VARIABLE = "UNIDIST_HOROVOD_BINDING"
AUTO = "auto"


@dataclass(frozen=True)
class HorovodBindingSpec:
    """One of Horovod's bindings, not imported yet.

    Args:
        name: of the framework's package, and of Horovod's subpackage for it; the word for it in the setting.
        title: the framework's name, for messages.
        library: pattern of the file that Horovod has if it was built for this framework.
        path: module and class.
    """

    name: str
    title: str
    library: str
    path: str

    def missing(self) -> str:
        """Return what this binding lacks here, as a part of a sentence; "" if nothing. Imports no framework."""
        if importlib.util.find_spec(self.name) is None:
            return f"{self.title} is not installed"
        with real_horovod():
            spec = importlib.util.find_spec("horovod")  # the package's own module imports nothing
        folders = spec.submodule_search_locations if spec is not None else None
        if not any(list(Path(folder, self.name).glob(self.library)) for folder in folders or ()):
            return f"Horovod was built without {self.title}"
        return ""

    def runs(self) -> bool:
        """Return whether Horovod runs in this process by this binding, no matter who started it."""
        operations = real_module(f"horovod.{self.name}.mpi_ops")
        return operations is not None and bool(operations.is_initialized())

    def load(self) -> HorovodBinding:
        """Import the binding, and the framework with it."""
        global _loaded
        module, _, name = self.path.partition(":")
        made: HorovodBinding = getattr(importlib.import_module(module), name)()
        _loaded = self
        return made


SPECS = (
    HorovodBindingSpec("torch", "PyTorch", "mpi_lib_v2*.so", "unidist_horovod.bindings.torch:TorchBinding"),
    HorovodBindingSpec(
        "tensorflow", "TensorFlow", "mpi_lib*.so", "unidist_horovod.bindings.tensorflow:TensorFlowBinding"
    ),
)
"""In the order of preference: operations of the first have less to do."""

# Each binding has its own copy of Horovod's runtime; a process must never have started both.
_loaded: HorovodBindingSpec | None = None


def usable() -> tuple[HorovodBindingSpec, ...]:
    """Return the bindings that can be used here and that the user's setting allows; imports no framework.

    Raises:
        ConfigurationError: there is none; says what each one lacks.
    """
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(f"Horovod is not installed; {HOW}") from None
    setting = Settings.read().horovod_binding
    allowed = [spec for spec in SPECS if setting in (AUTO, spec.name)]
    if not allowed:
        choices = ", ".join((AUTO, *(spec.name for spec in SPECS)))
        raise ConfigurationError(f"{VARIABLE}={setting!r} is no binding of Horovod's; choices: {choices}")
    lacking = {spec: spec.missing() for spec in allowed}
    found = tuple(spec for spec, what in lacking.items() if not what)
    if not found:
        asked = f" ({VARIABLE}={setting})" if setting != AUTO else ""
        reasons = " and ".join(lacking.values())
        raise ConfigurationError(f"Horovod {version} cannot be used{asked}: {reasons}; {HOW}")
    return found


def choose() -> HorovodBindingSpec:
    """Return the binding for this process.

    Of those that are usable: the one by which Horovod runs here, or ran; else that of a framework that the process
    has imported, so that no other need be; else the first.

    Raises:
        ConfigurationError: there is none, or the process has another one already.
    """
    found = usable()
    present = next((spec for spec in SPECS if spec.runs()), _loaded)
    if present is not None:
        if present not in found:
            raise ConfigurationError(
                f"this process has used Horovod by its binding of {present.title}, and a process can use one only; "
                f"leave {VARIABLE} out, or set it to {present.name}"
            )
        return present
    return next((spec for spec in found if spec.name in sys.modules), found[0])


def check_same(chosen: HorovodBindingSpec, rendezvous: Rendezvous, *, timeout: timedelta) -> None:
    """Raise ConfigurationError on every rank if ranks chose differently: they could not meet. Collective."""
    names = [item.payload.decode() for item in rendezvous.allgather(chosen.name.encode(), timeout=timeout)]
    if len(set(names)) == 1:
        return
    ranks = [
        f"{spec.title} on rank {format_ranks([rank for rank, name in enumerate(names) if name == spec.name])}"
        for spec in SPECS
        if spec.name in names
    ]
    raise ConfigurationError(
        f"the ranks would use different bindings of Horovod: {' and '.join(ranks)}. Each takes that of a framework it "
        f"has imported before init(): import the same ones on all ranks, or set {VARIABLE} to one for all"
    )
