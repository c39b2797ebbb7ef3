"""FedAvg whose rounds take their time in a batch job, so that it can be interrupted; its results are FedAvg's."""

import os
import time

from pydantic import Field

from hpcfl import FedAvg

JOBS = {"SLURM_JOB_ID", "PBS_JOBID", "FLUX_URI"}


class Paced(FedAvg):
    """FedAvg that pauses."""

    pause: float = Field(0.0, ge=0)
    """Seconds that the server's step takes longer."""
    restarts: int = Field(1, ge=0)
    """So often a job that pauses no more has been restarted."""

    def server(self, task, shared, sums):
        restarts = os.environ.get("SLURM_RESTART_COUNT", os.environ.get("HPCFL_RESTARTED", "0"))
        if JOBS & os.environ.keys() and int(restarts) < self.restarts:
            time.sleep(self.pause)
        return super().server(task, shared, sums)
