"""The worker as a server: an OpenAI-compatible HTTP interface in front of the one engine."""
