"""Traces replayed through the production core in virtual time: what would a store of this size have served?

from kvstore.replay import read_trace, replay

trace = read_trace("conversations.jsonl.zst", "mooncake")
print(replay(trace, dram_chunks=3_000, look_ahead=100).hit_rate)
"""

from kvstore.replay.machine import WHOLE_FUTURE, Result, replay
from kvstore.replay.readers import FORMATS, read_trace
from kvstore.replay.trace import Trace, Turn

__all__ = ["FORMATS", "WHOLE_FUTURE", "Result", "Trace", "Turn", "read_trace", "replay"]
