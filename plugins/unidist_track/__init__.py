"""Records of jobs for experiment trackers: `unidist launch --track KIND:TARGET`.

The launcher follows the job as the status page does (`observer`), and hands one point a second to a separate process
(`writer`), so that a tracker's library, however large, is never imported by the launcher or a rank. A tracker is a
`Tracker` (`tracker`), registered by a plugin; `csv_file` is the trivial one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidist.lazy import lazy_names

if TYPE_CHECKING:
    from unidist_track.tracker import TrackedJob, Tracker, TrackerSpec

__all__ = [
    "TrackedJob", "Tracker", "TrackerSpec",
]  # fmt: skip

__getattr__ = lazy_names(
    __name__,
    {
        "tracker": "TrackedJob Tracker TrackerSpec",
    },
)
