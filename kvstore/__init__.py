"""attnstore: a tiered store for the KV cache of LLM inference (client, daemon, scheduler and worker sides)."""

__version__ = "0.1.0"
