"""What the daemon is told of requests that wait, and of those that will come.

A prompt's token ids come from the request, or from a server's `/tokenize`, which knows the model's tokenizer and chat
template; their chunk keys are made here (`client.prompts`), in each namespace of the model: which server takes a
request is not known before its turn, and servers of other versions, layouts or parallel shapes have KV of their own.
Jobs are told as changes, at the position of the number that their request came with. Nobody waits for any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httpx

from kvstore.client import ActionKind, AsyncClient, Hint, HintAction, connect_async
from kvstore.errors import NotFound, StoreError, Unsupported
from kvstore.scheduler.gateway.dispatch import Asked, Dispatcher, Ticket
from kvstore.types import KEYS_PER_REQUEST_MAX, NamespaceId

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
NAMESPACES_MAX = 8
"""Of a model: those that were opened last are told of each request."""
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


@dataclass(slots=True)
class Waiting:
    """A request, as far as it is known. Empty: it is not."""

    tokens: Sequence[int] = ()
    hints: Sequence[Hint] = ()
    """One for each namespace, all at the request's position."""


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
        self._waiting: dict[int, Waiting] = {}
        """By the numbers of tickets."""
        self._unnamed = False
        """Of some of them no hints could be made, as the daemon was not there or did not know the model."""
        self._told: dict[bytes, Hint] = {}
        """By job."""
        self._namespaces: tuple[NamespaceId, ...] = ()
        """Of the model, as the daemon said last."""
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
        if len(self._waiting) < TOLD_MAX:
            waiting = self._waiting[ticket.number] = Waiting()
            self._spawn(self._look(ticket, waiting))

    def _left(self, ticket: Ticket) -> None:
        if self._waiting.pop(ticket.number, None) is None:
            return
        self._changed.set()
        if len(self._dispatcher) > len(self._waiting):
            untold = (other for other in self._dispatcher.waiting if other.number not in self._waiting)
            for following in islice(untold, 1):
                self._waits(following)

    async def _look(self, ticket: Ticket, waiting: Waiting) -> None:
        waiting.tokens = await self._tokens_of(ticket.asked)
        await self._name(ticket.number, waiting)
        if not waiting.hints:
            self.counters["unknown"] += 1

    async def _name(self, number: int, waiting: Waiting) -> None:
        """Makes the hints of a request; those that were made before stay if there is nothing to make others of."""
        client = self._client
        if client is None or not waiting.tokens:
            return
        try:
            model = await self._store_model(client)
            prompts = await client.prompts(model, waiting.tokens, timeout_s=TIMEOUT_S)
        except StoreError as error:
            self._complain(error)
            self._unnamed = True
            return
        hints = [
            Hint(b"%d.%d" % (number, where), number, keys=tuple(keys[:KEYS_PER_REQUEST_MAX]), namespace=where)
            for where, keys in prompts[:NAMESPACES_MAX]
            if keys
        ]
        if hints != waiting.hints:
            waiting.hints = hints
            self._changed.set()

    async def _name_anew(self) -> None:
        """The daemon is there again, or the model has other namespaces."""
        self._unnamed = False
        for number, waiting in list(self._waiting.items()):
            await self._name(number, waiting)
            if self._unnamed:
                return

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
        if body.get("cache_salt"):  # part of the server's hashes
            return []
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

    async def costs(self, asked: Asked) -> dict[str, float]:
        """By node: what it costs to have there what any node holds of this prompt. Empty: that is not known within
        ROUTE_S, which is the longest that a request waits for it."""
        try:
            async with asyncio.timeout(ROUTE_S):
                tokens, client = await self._tokens_of(asked), self._client
                if client is None or not tokens:
                    return {}
                model = await self._store_model(client)
                reply = await client.route(model, tokens=tokens, timeout_s=ROUTE_S)
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
        """Somebody types, or a tool runs: the session's chunks, or those of the prompt, are wanted in `eta_ms`, in the
        namespace that has most of them: what is kept for it counts against the tenant's share, there or not."""
        session = str(asked.body.get("session_id") or "")
        tokens: Sequence[int] = await self._tokens_of(asked)
        if not tokens:
            tokens = self._sessions.get(session, ())
        client = self._client
        if client is None or not tokens:
            return {"result": "rejected", "chunks": 0, "why": "no store, or no known prompt of this session"}
        name = (session or f"prompt {_digest(tokens)}").encode(errors="replace")[-JOB_NAME_BYTES_MAX:]
        action = HintAction(name, ActionKind.EXPECT, tokens=tuple(tokens), ttl_ms=ttl_ms, eta_ms=eta_ms)
        try:
            model = await self._store_model(client)
            answer = await client.apply_actions(model, [action], timeout_s=TIMEOUT_S)
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
                    self._unnamed = True
                if self._unnamed:
                    await self._name_anew()
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
        waiting = [hint for _, each in sorted(self._waiting.items()) for hint in each.hints]
        hints = [hint for hint in waiting if anew or self._told.get(hint.job) is not hint]
        names = {hint.job for hint in waiting}
        gone = [] if anew else [job for job in self._told if job not in names][:KEYS_PER_REQUEST_MAX]
        if not (hints or gone or (anew and self._told)):
            return
        self._changed.clear()
        boot = client.boot_id
        few: list[Hint] = []
        count = 0
        for hint in hints:  # what is over comes with the next message
            count += len(hint.keys)
            if few and count > KEYS_PER_REQUEST_MAX:
                self._changed.set()
                break
            few.append(hint)
        answer = await client.publish_queue(
            await self._store_model(client),
            few,
            removed=gone,
            snapshot=anew,
            ttl_ms=TTL_MS,
            timeout_s=TIMEOUT_S,
        )
        if anew:
            self._told.clear()
            self._boot, self._renew_at = boot, now + TTL_MS / 3000
        for job in gone:
            del self._told[job]
        self._told.update((hint.job, hint) for hint in few)
        self.counters["told"] += len({hint.position for hint in few})
        if self._namespaces != answer.namespaces:
            self._namespaces = answer.namespaces
            self._spawn(self._name_anew())


def _digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(repr(tokens).encode(), digest_size=16).hexdigest()
