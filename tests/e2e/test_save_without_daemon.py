"""What a save says of a daemon that is gone: not that its DRAM is full."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore.client import GrantResult, connect_async

from .ssd_tools import CHUNK, SPEC, client_of, eventually, keys_of


def test_every_way_to_save_says_that_the_daemon_is_away(start_daemon: Callable[..., Any]) -> None:
    daemon = start_daemon(dram_bytes=4 << 20, segment_bytes=1 << 20)
    away = (GrantResult.UNAVAILABLE,) * 2

    async def both() -> None:
        async with await connect_async(str(daemon.run_dir)) as other:
            theirs = await other.open(SPEC)
            with client_of(daemon, timeout_s=5.0) as client:
                space = client.open(SPEC)
                keys = keys_of(space, 2)
                daemon.kill()
                eventually(lambda: not client.connected and not other.connected)
                for staged in (True, False):
                    with space.write(keys, staged=staged) as batch:
                        assert batch.results == away and batch.commit().error is not None
                values = np.zeros((2, CHUNK), np.uint8)
                assert space.put(keys, values).results == away
                assert client.counters["saves_dropped"] >= 4
                async with await theirs.write(keys) as batch_:
                    assert batch_.results == away
                assert (await theirs.put(keys, values)).results == away

    asyncio.run(both())
