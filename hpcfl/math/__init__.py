"""Matrices and Gaussians, knowing nothing of learning."""
