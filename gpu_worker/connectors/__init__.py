"""Plug-ins for inference engines. Each is thin: it translates, the client does the work."""
