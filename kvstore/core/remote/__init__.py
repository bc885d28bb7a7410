"""What is beyond this node as the core sees it: a REMOTE store that many nodes share, and the nodes next to this one.

`sources.py` looks chunks up there and brings them here. Nothing in here knows Redis, an object store or a socket."""
