"""Federated learning as an ordinary MPI batch job."""
