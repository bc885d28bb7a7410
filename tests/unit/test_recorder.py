"""What the recorder keeps, drops and writes, without a daemon around it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.errors import Conflict
from kvstore.server import recorder as module
from kvstore.server.recorder import Recorder
from kvstore.types import ChunkKey, NamespaceId, WorkerId

pytest.importorskip("aiofiles", reason="aiofiles is not installed: the daemon cannot record")
WORKER = SimpleNamespace(group=SimpleNamespace(tenant="default", name="engine"))
NAMESPACE = SimpleNamespace(id=7, spec=SimpleNamespace(chunk_tokens=64), payload_bytes=1 << 20)


def recorder() -> tuple[Recorder, list[Any]]:
    taps: list[Any] = []
    state = SimpleNamespace(namespaces={7: NAMESPACE}, workers=dict.fromkeys((3, 4), WORKER))
    return Recorder(state, taps.append), taps  # type: ignore[arg-type]


def ask(*keys: bytes, namespace: int = 7) -> ev.Acquire:
    return ev.Acquire(ev.Ticket(WorkerId(3)), NamespaceId(namespace), tuple(map(ChunkKey, keys)))


async def test_lookups_and_saves_are_written_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    made, taps = recorder()
    await made.start(str(path))
    see = taps[-1]
    see(ask(b"a", b"b"), 100)
    see(ev.Tick(), 101)
    see(ask(b"a", namespace=8), 102)
    see(ev.Reserve(ev.Ticket(WorkerId(4)), NamespaceId(7), (ChunkKey(b"c"),), ChunkKey(b"b")), 130)
    done = await made.stop()
    assert taps[-1] is None
    assert done is not None and (done.lookups, done.saves, done.dropped) == (1, 1, 0)
    _, asked, saved = map(json.loads, path.read_text().splitlines())
    assert (asked["t"], asked["w"], asked["n"], asked["c"], asked["b"]) == (0, 0, 0, 64, 1 << 20)
    assert (saved["t"], saved["w"], saved["after"]) == (30, 1, asked["ask"][1])
    assert len({*asked["ask"], *saved["save"]}) == 3


async def test_two_recordings_have_no_number_in_common(tmp_path: Path) -> None:
    numbers = []
    for name in ("one", "two"):
        made, taps = recorder()
        await made.start(str(tmp_path / name))
        taps[-1](ask(b"a", b"b"), 0)
        await made.stop()
        numbers.append(set(json.loads((tmp_path / name).read_text().splitlines()[1])["ask"]))
    assert not numbers[0] & numbers[1]


async def test_a_full_buffer_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEYS_MAX", 5)
    made, taps = recorder()
    await made.start(str(tmp_path / "trace"))
    for _ in range(4):  # in one turn of the loop: the writer has no chance
        taps[-1](ask(b"a", b"b"), 0)
    done = await made.stop()
    assert done is not None and (done.lookups, done.dropped) == (2, 2)


async def test_it_ends_by_itself_at_its_size(tmp_path: Path) -> None:
    made, taps = recorder()
    await made.start(str(tmp_path / "trace"), bytes_max=10)
    with pytest.raises(Conflict):
        await made.start(str(tmp_path / "other"))
    taps[-1](ask(b"a"), 0)
    assert made._task is not None
    await made._task
    assert made.last is not None and not made.last.running
    assert "bytes" in made.last.ended
    assert taps[-1] is None
    await made.start(str(tmp_path / "other"))
    await made.stop()
