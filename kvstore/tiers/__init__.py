"""Where shards live: `arena.py` (DRAM), `ssd.py` (slab files). `base.py`: what the one asks of the other."""
