"""FedAvg whose rounds take their time in a batch job, so that it can be interrupted; its results are FedAvg's."""

import os
import time

from pydantic import Field

from hpcfl import FedAvg


class Paced(FedAvg):
    """FedAvg that pauses."""

    pause: float = Field(0.0, ge=0)
    """Seconds that the server's step takes longer."""
    restarts: int = Field(1, ge=0)
    """So often Slurm has restarted a job that pauses no more."""

    def server(self, task, shared, sums):
        if "SLURM_JOB_ID" in os.environ and int(os.environ.get("SLURM_RESTART_COUNT", "0")) < self.restarts:
            time.sleep(self.pause)
        return super().server(task, shared, sums)
