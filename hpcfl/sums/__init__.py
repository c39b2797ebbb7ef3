"""Messages and how they are summed to the bit: no MPI."""
