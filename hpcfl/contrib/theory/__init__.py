"""Bounds and complexity by the papers, computed for a config or a run."""
