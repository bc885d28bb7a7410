"""A scheduler knows sessions and prompts of a model, and workers open another namespace of it while it lives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import kvctl
from kvstore.client import ActionKind, Client, Hint, HintAction, Namespace, SessionEntry
from kvstore.scheduler.hints import HintedQueue
from kvstore.scheduler.job_queue import Job
from kvstore.types import HintResult, Outcome, Wait

from .ssd_tools import SMALL_SSD, SPEC, client_of, eventually, save

ACCEPTED, DEFERRED, CLIPPED, REJECTED = HintResult
V1 = SPEC
V2 = replace(SPEC, chunk_tokens=32, layout_fingerprint="test:other bytes")
OWN = replace(SPEC, hash_protocol="my-keys.v1")
PIN = ActionKind.PIN


def talk(space: Namespace, session: bytes, count: int, *, wait: Wait = Wait.VISIBLE) -> list[int]:
    """Record a session of so many chunks; its tokens."""
    tokens = list(range(ord(session[-1:]) << 16, (ord(session[-1:]) << 16) + count * space.spec.chunk_tokens))
    keys = space.keys(tokens)
    save(space, keys, wait=wait)
    each = space.spec.chunk_tokens
    entries = [SessionEntry(key, each * at, each) for at, key in enumerate(keys)]
    space.update_session(session, expected_version=0, keep=0, append=entries)
    return tokens


def publish(scheduler: Client, *hints: Hint) -> list[str]:
    return [result.name for result in scheduler.publish_queue(SPEC.model, hints).results]


def test_a_scheduler_that_lives_long_sees_what_workers_open(
    start_daemon: Callable[..., Any],
    run_dir: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {**SMALL_SSD, "ssd_dir": run_dir.parent / "ssd"}
    daemon = start_daemon(**settings)
    with contextlib.ExitStack() as stack:
        scheduler, first, second, third = (stack.enter_context(client_of(daemon)) for _ in range(4))
        v1 = first.open(V1)
        tokens = talk(v1, b"chat 1", 3, wait=Wait.DURABLE)
        assert publish(scheduler, Hint(b"1", 0, session=b"chat 1")) == ["ACCEPTED"]
        prompt = talk(second.open(V2), b"chat 2", 4)
        third.open(OWN)
        hints = [
            Hint(b"1", 0, session=b"chat 1"),
            Hint(b"2", 1, session=b"chat 2"),
            Hint(b"3", 2, session=b"x"),
        ]
        assert publish(scheduler, *hints) == ["ACCEPTED", "ACCEPTED", "REJECTED"]
        first.open(V1)  # a rollback
        assert publish(scheduler, *hints) == ["ACCEPTED", "ACCEPTED", "REJECTED"]
        actions = [HintAction(b"v1", PIN, tokens=tuple(tokens)), HintAction(b"v2", PIN, tokens=tuple(prompt))]
        assert scheduler.apply_actions(SPEC.model, actions).chunks == (3, 4)
        queue = HintedQueue(scheduler, SPEC.model)
        queue.put(Job("nobody", (1,), 1))
        eventually(lambda: queue.rejected > 0)
        queue.close()
        (said,) = [record.message for record in caplog.records if "rejected" in record.message]
        assert "(looked at: 1, 3, 2)" in said, "the one opened last first"
        for named in (tokens, prompt):
            command = ["route", "--model", SPEC.model, "--tokens", ",".join(map(str, named))]
            with pytest.raises(SystemExit, match=r"^0$"):
                kvctl.main(["--run-dir", str(run_dir), *command])
            held = capsys.readouterr().out.splitlines()[1].split("(this node)")[1].split()
            assert held[0] == str(len(named) // (64 if named is tokens else 32)), held
        daemon.stop()
        start_daemon(**settings)
        scheduler.wait_connected(20)
        assert publish(scheduler, hints[0]) == ["ACCEPTED"], "before anybody opened it again"
        eventually(lambda: set(v1.match(v1.keys(tokens)).outcomes) == {Outcome.HIT})
