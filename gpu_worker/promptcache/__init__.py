"""Prompt Cache in the worker: which KV of a prompt is loaded and which computed, and who computes the modules' own."""
