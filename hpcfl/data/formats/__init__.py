"""Readers of file formats: what is in a file, checked before it is believed."""
