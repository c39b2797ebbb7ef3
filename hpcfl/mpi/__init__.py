"""Ranks: who is where, and what travels between them."""
