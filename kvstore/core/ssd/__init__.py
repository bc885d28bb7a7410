"""The SSD tier as the core sees it: what is written, read back, durable, restored, scrubbed and out of service."""
