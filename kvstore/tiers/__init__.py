"""Where shards live: `arena.py` (DRAM). The next ones implement the ports of `base.py`."""
