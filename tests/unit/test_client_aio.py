"""Copies on an event loop: who is cancelled has the memory back."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvstore.client import aio
from kvstore.client.aio import COPY_INLINE_MAX, AsyncReadLease, AsyncWriteBatch, connect_async
from kvstore.errors import Unavailable

BOUND_S = 20.0


class Copies:
    """A lease or batch whose copies last until they are let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.ended = 0

    def copy_to(self, index: int, out: Any, **_: Any) -> bool:
        self.begun.set()
        assert self.go_on.wait(BOUND_S)
        self.ended += 1
        return True

    def copy_many(self, pieces: Any) -> bool:
        return self.copy_to(0, pieces)

    def copy_from(self, index: int, source: Any, **_: Any) -> None:
        self.copy_to(index, source)


CALLS = {
    "copy_to": lambda copies, bits: AsyncReadLease(copies).copy_to(0, bits),
    "copy_many": lambda copies, bits: AsyncReadLease(copies).copy_many([(0, 0, 0, bits)]),
    "copy_many into a batch": lambda copies, bits: AsyncWriteBatch(copies).copy_many([(0, 0, bits)]),
    "copy_from": lambda copies, bits: AsyncWriteBatch(copies).copy_from(0, bits),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_cancelled_copy_has_ended(name: str) -> None:
    copies = Copies()
    task = asyncio.ensure_future(CALLS[name](copies, np.zeros(COPY_INLINE_MAX, np.uint8)))
    await asyncio.to_thread(copies.begun.wait, BOUND_S)
    for _ in range(3):  # again, too, as a second timeout would
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done(), "it still copies"
    copies.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND_S)
    assert copies.ended == 1


async def test_a_copy_that_is_cancelled_before_its_turn_never_begins() -> None:
    """And nobody waits for it: all threads may be busy for long."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    first, second = Copies(), Copies()
    bits = np.zeros(COPY_INLINE_MAX, np.uint8)
    running = asyncio.ensure_future(AsyncReadLease(first).copy_to(0, bits))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(AsyncReadLease(second).copy_to(0, bits))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, BOUND_S)
    first.go_on.set()
    second.go_on.set()
    assert await asyncio.wait_for(running, BOUND_S)
    await asyncio.to_thread(lambda: None)  # behind it in the only thread
    assert not second.begun.is_set()


async def test_what_a_copy_raises_is_raised() -> None:
    class Fails(Copies):
        def copy_to(self, index: int, out: Any, **_: Any) -> bool:
            raise ValueError("of the copy")

    with pytest.raises(ValueError, match="of the copy"):
        await AsyncReadLease(Fails()).copy_to(0, np.zeros(COPY_INLINE_MAX, np.uint8))


class Connected:
    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


@pytest.mark.parametrize("fails", [False, True])
async def test_who_is_cancelled_while_he_connects_leaves_no_connection(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    client = Connected()

    def connect(*_: Any, **__: Any) -> Connected:
        begun.set()
        assert go.wait(BOUND_S)
        if fails:
            raise Unavailable("nobody there")
        return client

    monkeypatch.setattr(aio, "connect", connect)
    connecting = asyncio.ensure_future(connect_async("/nowhere"))
    assert await asyncio.to_thread(begun.wait, BOUND_S)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert not client.closed.is_set()
    go.set()
    assert fails or await asyncio.to_thread(client.closed.wait, BOUND_S)


async def test_connecting_raises_what_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any, **__: Any) -> Connected:
        raise Unavailable("nobody there")

    monkeypatch.setattr(aio, "connect", connect)
    with pytest.raises(Unavailable, match="nobody there"):
        await connect_async("/nowhere")
