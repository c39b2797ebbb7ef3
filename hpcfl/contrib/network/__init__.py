"""What messages cost: measured over MPI, and a model that predicts rounds on more ranks."""
