"""What the daemon is told of requests that wait, and of those that will come.

A prompt's token ids come from the request, or from a server's `/tokenize`, which knows the model's tokenizer and chat
template; their chunk keys are made here (`client.prompts`), once for each request. Jobs are told as changes, under the
number that they came with, which is also their position. Nobody waits for any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Sequence
from itertools import islice
from typing import Any

import httpx

from kvstore.client import ActionKind, AsyncClient, Hint, HintAction, connect_async
from kvstore.errors import NotFound, StoreError, Unsupported
from kvstore.scheduler.gateway.dispatch import Asked, Dispatcher, Ticket
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey

TTL_MS = 30_000
TIMEOUT_S = 1.0
ROUTE_S = 0.25
DRAINING_MS = 60_000.0
"""As if a node that is about to leave, or cannot be reached, were so far away."""
RETRY_S = 1.0
SETTLE_S = 0.02
"""Changes that come together are told together."""
TOKENIZING_MAX = 4
TOKENIZE_S = 10.0
TOLD_MAX = 1_024
"""How far into the queue hints reach: the daemon clips them to the memory it has."""
SESSIONS_MAX = 4_096
SESSION_TOKENS_MAX = 1 << 25
"""Of the last prompts of all sessions, in 4 bytes each."""
JOB_NAME_BYTES_MAX = 64
TEMPLATE = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
    "chat_template",
)
"""Fields of a chat that decide which tokens it becomes."""
log = logging.getLogger(__name__)


class LookAhead:
    """`counters`: told (jobs), unknown (prompts of which no token ids were to be had), failed (messages that were not
    heard), expected (presence hints that the daemon took), routed and unrouted (requests of which it was known
    which node has their beginning, or not in time)."""

    def __init__(self, run_dir: str, model: str, dispatcher: Dispatcher, http: httpx.AsyncClient) -> None:
        """`model`: as the workers call it in their namespace (`kvctl namespaces`); "": the only one there is."""
        self._run_dir = run_dir
        self._model = model
        self._dispatcher = dispatcher
        self._http = http
        self._client: AsyncClient | None = None
        self._keys: dict[int, list[ChunkKey]] = {}
        """Of tickets that wait, by number; empty: not known."""
        self._told: set[int] = set()
        self._sessions: OrderedDict[str, array[int]] = OrderedDict()
        """Token ids of a session's last prompt."""
        self._session_tokens = 0
        self._boot = b""
        self._renew_at = 0.0
        self._complained = ""
        self._changed = asyncio.Event()
        self._tokenizing = asyncio.Semaphore(TOKENIZING_MAX)
        self._tasks: set[asyncio.Task[None]] = set()
        self.counters: Counter[str] = Counter(told=0, unknown=0, failed=0, expected=0, routed=0, unrouted=0)
        dispatcher.on_wait, dispatcher.on_leave = self._waits, self._left

    def start(self) -> None:
        self._spawn(self._run())

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------------------------------------- who waits

    def _waits(self, ticket: Ticket) -> None:
        if len(self._keys) < TOLD_MAX:
            self._keys[ticket.number] = []
            self._spawn(self._find_keys(ticket))

    def _left(self, ticket: Ticket) -> None:
        if self._keys.pop(ticket.number, None) is None:
            return
        self._changed.set()
        if len(self._dispatcher) > len(self._keys):
            untold = (other for other in self._dispatcher.waiting if other.number not in self._keys)
            for following in islice(untold, 1):
                self._waits(following)

    async def _find_keys(self, ticket: Ticket) -> None:
        keys = await self._keys_of(await self._tokens_of(ticket.asked))
        if not keys:
            self.counters["unknown"] += 1
        elif ticket.number in self._keys:
            self._keys[ticket.number] = keys
            self._changed.set()

    def answered(self, ticket: Ticket) -> None:
        """Its session will come again, with all that it had now at its beginning."""
        if ticket.session:
            self._spawn(self._remember(ticket))

    async def _remember(self, ticket: Ticket) -> None:
        tokens = await self._tokens_of(ticket.asked)
        if not tokens or not 0 <= min(tokens) <= max(tokens) < 1 << 32:
            return
        self._session_tokens += len(tokens) - len(self._sessions.pop(ticket.session, ()))
        self._sessions[ticket.session] = array("I", tokens)
        while len(self._sessions) > SESSIONS_MAX or self._session_tokens > SESSION_TOKENS_MAX:
            self._session_tokens -= len(self._sessions.popitem(last=False)[1])

    # ---------------------------------------------------------------------------------------------------- prompts

    async def _tokens_of(self, asked: Asked) -> list[int]:
        """Empty: they are not to be had."""
        body = asked.body
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            return prompt
        ask: dict[str, Any] = {"model": body.get("model")}
        if isinstance(prompt, str):
            ask["prompt"] = prompt
        elif isinstance(body.get("messages"), list):
            ask |= {name: body[name] for name in ("messages", *TEMPLATE) if name in body}
        else:
            return []
        for server in self._dispatcher.servers:
            if not server.up:
                continue
            try:
                async with self._tokenizing:
                    answer = await self._http.post(
                        f"{server.url}/tokenize", json=ask, headers=asked.headers, timeout=TOKENIZE_S
                    )
                found = answer.json().get("tokens") if answer.status_code == 200 else None
            except (httpx.HTTPError, ValueError, RecursionError, AttributeError):
                continue  # a text that is no Unicode, or an answer that is none
            if isinstance(found, list) and all(type(token) is int for token in found):
                return found
            return []
        return []

    async def _keys_of(self, tokens: Sequence[int]) -> list[ChunkKey]:
        client = self._client
        if client is None or not tokens:
            return []
        try:
            keys = await client.prompt_keys(await self._store_model(client), tokens, timeout_s=TIMEOUT_S)
        except StoreError as error:
            self._complain(error)
            return []
        return keys[:KEYS_PER_REQUEST_MAX]

    async def costs(self, asked: Asked) -> dict[str, float]:
        """By node: what it costs to have there what any node holds of this prompt. Empty: that is not known within
        ROUTE_S, which is the longest that a request waits for it."""
        try:
            async with asyncio.timeout(ROUTE_S):
                keys = await self._keys_of(await self._tokens_of(asked))
                client = self._client
                if client is None or not keys:
                    return {}
                reply = await client.route(self._model, keys=keys, timeout_s=ROUTE_S)
        except (TimeoutError, StoreError):
            self.counters["unrouted"] += 1
            return {}
        self.counters["routed"] += 1
        return {
            node.name: DRAINING_MS if node.draining or not node.reachable else node.cost_ms
            for node in reply.nodes
        }

    async def _store_model(self, client: AsyncClient) -> str:
        """Raises NotFound."""
        if not self._model:
            self._model = await client.only_model(timeout_s=TIMEOUT_S)
        return self._model

    def _complain(self, error: StoreError) -> None:
        """Once, not with each request."""
        if isinstance(error, NotFound | Unsupported) and self._complained != str(error):
            self._complained = str(error)
            log.warning("nothing is told ahead: %s", error)

    # --------------------------------------------------------------------------------------------------- presence

    async def expect(self, asked: Asked, eta_ms: int, ttl_ms: int) -> dict[str, Any]:
        """Somebody types, or a tool runs: the session's chunks, or those of the prompt, are wanted in `eta_ms`."""
        session = str(asked.body.get("session_id") or "")
        tokens: Sequence[int] = await self._tokens_of(asked)
        if not tokens:
            tokens = self._sessions.get(session, ())
        keys = await self._keys_of(tokens)
        client = self._client
        if client is None or not keys:
            return {"result": "rejected", "chunks": 0, "why": "no store, or no known prompt of this session"}
        name = (session or f"prompt {keys[-1].hex()}").encode(errors="replace")[-JOB_NAME_BYTES_MAX:]
        action = HintAction(name, ActionKind.EXPECT, keys=tuple(keys), ttl_ms=ttl_ms, eta_ms=eta_ms)
        try:
            answer = await client.apply_actions(self._model, [action], timeout_s=TIMEOUT_S)
        except StoreError as error:
            self.counters["failed"] += 1
            return {"result": "rejected", "chunks": 0, "why": str(error)}
        self.counters["expected"] += 1
        return {"result": answer.results[0].name.lower(), "chunks": answer.chunks[0]}

    # ----------------------------------------------------------------------------------------------------- telling

    async def _run(self) -> None:
        while True:
            try:
                if self._client is None:
                    self._client = await connect_async(self._run_dir, timeout_s=TIMEOUT_S)
                    for ticket in self._dispatcher.waiting:
                        self._waits(ticket)
                await self._tell()
            except StoreError as error:
                self.counters["failed"] += 1
                self._complain(error)
                await asyncio.sleep(RETRY_S)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), RETRY_S)
                await asyncio.sleep(SETTLE_S)

    async def _tell(self) -> None:
        client = self._client
        assert client is not None
        now = time.monotonic()
        anew = client.boot_id != self._boot or now >= self._renew_at
        known = {number: keys for number, keys in self._keys.items() if keys}
        if not (anew and (known or self._told)) and known.keys() == self._told:
            return
        self._changed.clear()
        boot = client.boot_id
        hints = [
            Hint(b"%d" % number, number, keys=tuple(keys))
            for number, keys in sorted(known.items())
            if anew or number not in self._told
        ]
        few: list[Hint] = []
        count = 0
        for hint in hints:  # what is over comes with the next message
            count += len(hint.keys)
            if few and count > KEYS_PER_REQUEST_MAX:
                self._changed.set()
                break
            few.append(hint)
        gone = [] if anew else [b"%d" % number for number in self._told - known.keys()]
        await client.publish_queue(
            await self._store_model(client),
            few,
            removed=gone[:KEYS_PER_REQUEST_MAX],
            snapshot=anew,
            ttl_ms=TTL_MS,
            timeout_s=TIMEOUT_S,
        )
        told = {hint.position for hint in few}
        self._told = told if anew else (self._told & known.keys()) | told
        self.counters["told"] += len(few)
        if anew:
            self._boot, self._renew_at = boot, now + TTL_MS / 3000
