"""The changes to Horovod 0.28.1's sources: what current PyTorch and TensorFlow need, and two repairs of its end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unidist.errors import ConfigurationError


@dataclass(frozen=True)
class Change:
    """One replacement of text that occurs exactly once in a file."""

    file: str
    old: str
    new: str


_REMOVAL = """\
    while (true) {
      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      if (ProcessSetHasJustBeenRemoved()) {
        break;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
"""
_REMOVAL_ALONE = """\
    } catch (const std::exception& ex) {
      LOG(DEBUG) << "Removing process set " << id << " alone: " << ex.what();
      id_to_process_set_[id].Finalize(status);
      DeregisterProcessSet(id);
      id_to_be_removed_ = NO_PENDING_REMOVAL;
    }
"""

CHANGES = (
    # The headers of PyTorch and TensorFlow are C++17 by now.
    Change("CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    Change("horovod/torch/CMakeLists.txt", "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)"),
    # Uses parts of XLA that TensorFlow does not ship any more.
    Change(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
    ),
    # A stopped Horovod kept its connections and their threads until it was started again, and a forked child that
    # started it waited for those threads, which it has not, for good: the contexts of process sets are never "enabled".
    Change(
        "horovod/common/gloo/gloo_context.cc",
        "void GlooContext::Finalize() {\n  if (!enabled_) {\n    return;\n  }\n",
        "void GlooContext::Finalize() {\n",
    ),
    # Where there are process sets, the death of one rank ended all others by SIGABRT: nobody caught what the
    # agreement on removing the sets throws. They need no agreement when a rank is gone.
    Change("horovod/common/process_set.cc", _REMOVAL, f"    try {{\n{_REMOVAL}{_REMOVAL_ALONE}"),
)


def apply(folder: Path) -> None:
    """Make the changes in the unpacked sources in `folder`.

    Raises:
        ConfigurationError: these are not the sources that the changes are for; nothing was written.
    """
    changed: dict[Path, str] = {}
    for change in CHANGES:
        path = folder / change.file
        try:
            text = changed.get(path) or path.read_text(encoding="utf-8")
        except OSError as exc:
            raise ConfigurationError(
                f"Horovod's sources have no {change.file} ({exc.strerror}): not version 0.28.1?"
            ) from exc
        if text.count(change.old) != 1:
            raise ConfigurationError(
                f"{change.file} of Horovod's sources has {text.count(change.old)} times, instead of once: "
                f"{change.old.strip()!r}. These are not the sources of version 0.28.1 as they were published."
            )
        changed[path] = text.replace(change.old, change.new)
    for path, text in changed.items():
        path.write_text(text, encoding="utf-8")
