"""What reads finished runs: their models, tables of runs and sweeps, curves."""
