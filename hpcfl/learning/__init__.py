"""What a model computes for a chunk of clients: batches, gradients, tests; and what takes a step."""
