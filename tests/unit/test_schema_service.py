"""Schemas of a tenant that another node was told to purge: what fails is tried again."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.transport import schema_service
from kvstore.transport.schema_service import SchemaService

BOUND_S = 30.0


class Files:
    """Of which the first removals fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.removed: list[bytes] = []
        self.gone = threading.Event()

    def remove_all_marked(self, mark: bytes) -> int:
        if self.failures:
            self.failures -= 1
            raise Unavailable("the disk fails", field="schema")
        self.removed.append(mark)
        self.gone.set()
        return 2


@pytest.mark.parametrize("failures", [0, 3])
def test_schemas_of_a_purged_tenant_go_at_last(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_service, "PURGE_RETRY_S", 0.001)
    files: Any = Files(failures)

    async def purge() -> None:
        service = SchemaService(None, files)  # type: ignore[arg-type]
        said = asyncio.Event()
        service.purged(b"mark", said.set)
        await asyncio.wait_for(said.wait(), BOUND_S)
        assert files.removed == [b"mark"], "it is said to be done before it is"

    asyncio.run(purge())
    assert files.removed == [b"mark"]
    assert files.failures == 0


def test_what_finds_too_many_waiting_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_service, "PURGE_RETRY_S", 0.001)
    files: Any = Files(0)

    async def purge() -> None:
        service = SchemaService(None, files)  # type: ignore[arg-type]
        room = service._thread._room
        for _ in range(schema_service.WAITING_MAX):
            assert room.acquire(blocking=False)
        service.purged(b"mark", lambda: None)
        await asyncio.sleep(0.01)
        assert not files.removed
        room.release()
        assert await asyncio.to_thread(files.gone.wait, BOUND_S)

    asyncio.run(purge())
    assert files.removed == [b"mark"]
