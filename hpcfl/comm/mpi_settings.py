"""What MPI is told before it starts, by settings that it reads from the environment.

Nonblocking collectives are to be binomial trees. By themselves both MPIs cut large messages into pieces that go around
in turns. A piece moves on when its rank looks, and ranks that give way between two looks make it wait: 1 MB to and from
9 ranks took 12 times as long under MPICH, 100 MB to and from 3 ranks twice as long under Open MPI. In a binomial tree a
message is one piece.

Where MPI tells of dead ranks, MPI_Finalize is not to wait for the launcher. It meets twice there: over MPI without the
dead, then once more through the launcher, which at times goes on waiting for them (with two ranks killed about 1 run in
50 never ended on a busy machine; open-mpi/ompi issue 11404).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

ULFM = "OMPI_MCA_mpi_ft_enable"  # all that the ranks see of mpiexec --with-ft ulfm
TREES = {
    "OMPI_MCA_coll_libnbc_ibcast_algorithm": "2",
    "OMPI_MCA_coll_libnbc_ireduce_algorithm": "2",
    "MPIR_CVAR_IBCAST_INTRA_ALGORITHM": "sched_binomial",
    "MPIR_CVAR_IREDUCE_INTRA_ALGORITHM": "sched_binomial",
}
FAREWELL = {"OMPI_MCA_async_mpi_finalize": "1"}


def ulfm_asked(environ: Mapping[str, str]) -> bool:
    """Return whether the launcher was asked for fault tolerance."""
    return environ.get(ULFM, "").lower() in ("1", "true", "yes", "enabled")


def prefer(environ: MutableMapping[str, str]) -> None:
    """Add these settings where the environment does not say what is wanted; to be called before MPI starts."""
    for name, value in (TREES | FAREWELL if ulfm_asked(environ) else TREES).items():
        environ.setdefault(name, value)
