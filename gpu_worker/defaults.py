"""Defaults that the worker's options and its engine share; to know them takes no torch."""

CHUNK_TOKENS = 64
WAITING_MAX = 1024
"""Requests that wait."""
