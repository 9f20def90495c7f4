"""The launcher of elastic jobs: on this host, or on several by ssh."""

from __future__ import annotations

import platform

from unidist.engine import Availability
from unidist.errors import ConfigurationError
from unidist.launcher import Job, Launcher, RunsElasticJobs, StartsSideProcesses
from unidist_launch.elastic_job.fallback import run_elastic
from unidist_launch.elastic_job.run import ElasticRun


class ElasticLauncher(Launcher, RunsElasticJobs, StartsSideProcesses):
    """Runs a job whose ranks come and go. One agent on each host, this one included."""

    def availability(self) -> Availability:
        """Usable on Linux."""
        if platform.system() != "Linux":
            return Availability(False, f"needs Linux, this is {platform.system()}")
        return Availability(True, "this host, and others by ssh")

    def run(self, job: Job) -> int:
        """Run the job; see `Launcher.run`. To be called from the main thread, for it handles signals.

        It ends with 0 when the script has come to its end on the ranks that were there then, whatever was lost before.
        Ranks read nothing on standard input.
        """
        if job.elastic is None:
            raise ConfigurationError("the elastic launcher is for elastic jobs: give --min-np, or --max-np.")
        return run_elastic(job, ElasticRun)
