"""Several optimizers of a checkpoint as one: Muon and AdamW of one job, for another one that has both in one class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from typing_extensions import override

from unidist.buffer import Buffer
from unidist.checkpoint.format.interface import SavedSection
from unidist.checkpoint.format.optimizer_record import OptimizerRecord
from unidist.checkpoint.format.parts import Part
from unidist.checkpoint.format.pieces import TensorInfo
from unidist.checkpoint.format.reader import match
from unidist.checkpoint.format.slots import OptimizerNaming
from unidist.errors import CheckpointError


class JoinedSection(SavedSection):
    """The sections of several optimizers, as if one had all of their parameters.

    Args:
        sections: by name.
        what: they are, for messages.
        report: see `Checkpoint`.

    Raises:
        CheckpointError: two of them have a parameter in common.
    """

    def __init__(self, sections: Mapping[str, SavedSection], *, what: str, report: Callable[[str], None]) -> None:
        self._what = what
        self._report = report
        self._tensors = {name: info for section in sections.values() for name, info in section.tensors.items()}
        self._owners = {name: section for section in sections.values() for name in section.tensors}
        self.values = _joined({name: OptimizerRecord.of(section.values) for name, section in sections.items()}).values()

    @property
    @override
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @override
    def read(self, name: str, part: Part, target: Buffer) -> None:
        if name not in self._owners:
            raise CheckpointError(f"{self._what} have no tensor {name!r}")
        self._owners[name].read(name, part, target)

    @override
    def match(self, wanted: Collection[TensorInfo], *, strict: bool = True) -> list[TensorInfo]:
        return match(self._what, self._tensors, wanted, strict=strict, report=self._report, elsewhere=self.elsewhere)


def _joined(records: Mapping[str, OptimizerRecord]) -> OptimizerRecord:
    """Return one record of several optimizers of one job, by name."""
    namings = [record.naming for record in records.values()]
    kind = " and ".join(next(iter(naming.kinds), "an optimizer") for naming in namings)
    joined = OptimizerRecord(OptimizerNaming(namings[0].dialect, (kind,)))
    for name, record in records.items():
        common = joined.group_of.keys() & record.group_of.keys()
        if common:
            raise CheckpointError(
                f"the optimizers {', '.join(records)} that were saved have parameters in common ({min(common)!r}): "
                "they cannot be loaded as one. Load each by its name, optimizer={...}"
            )
        joined.groups |= {f"{name}.{number}": options for number, options in record.groups.items()}
        joined.group_of |= {path: f"{name}.{number}" for path, number in record.group_of.items()}
        joined.scalars |= record.scalars
        for path in record.group_of:
            joined.add_family(path, record.naming_of(path))
    return joined
