"""Tests that every algorithm passes; for one of yours: ``pytest --pyargs hpcfl.testing --algorithm mine:FedProx``."""
