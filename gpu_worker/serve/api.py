"""The HTTP interface: chat and text completions as OpenAI words them, health, metrics, and what an operator may do.

| call | |
|---|---|
| `POST /v1/chat/completions`, `/v1/completions` | with `"stream": true` as server-sent events |
| `GET /v1/models` | the one model |
| `GET /health` | 200 while the engine computes, 503 when it does not |
| `GET /metrics` | for Prometheus |
| `POST /flush` | `{"timeout_s": 5}`: waits until all KV is saved |
| `GET /promptcache` | how prompts of modules are served, and what was encoded |
| `POST /promptcache/verify` | measures what modules cost in quality, and decides how they are served |
| `POST /reset` | `{"epoch": 3}`: weights were changed; what was computed before is not used any more |

A request names its session in the field `session_id` or the header `X-Session-Id`; without one its tokens decide what
is reused, but for the tail behind the last full chunk. A chat may be a prompt of modules: `"pml": "<prompt ...>"` in
place of `messages` (docs/promptcache.md). A client that goes away ends its request before the next step.
Where the worker truncates (`--truncate-tokens`), a conversation that outgrows its window goes on without its oldest
turns: `usage.prompt_tokens_details.cut_tokens` says how much was not looked at, and `"truncation": "disabled"` in a
request refuses it instead. With API keys each tenant has sessions and chunks of its own; `/flush` and `/reset` are then
for the tenant `admin`.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvstore.errors import Exhausted, StoreError, Unavailable
from kvstore.gpu_worker.promptcache.plan import OWNER_PREFIX
from kvstore.gpu_worker.promptcache.prompts import Planned
from kvstore.gpu_worker.promptcache.quality import KL_MAX, PERPLEXITY_MAX, SAMPLES_MAX, Sample
from kvstore.gpu_worker.promptcache.service import PromptCache, served_as
from kvstore.gpu_worker.serve.metrics import CONTENT_TYPE, Metrics
from kvstore.gpu_worker.serve.protocol import (
    Refused,
    Wish,
    check_model,
    messages_of,
    number_of,
    prompt_of,
    shown,
    wish_of,
)
from kvstore.gpu_worker.serve.service import Ask, Job, Service, StepFailed
from kvstore.gpu_worker.serve.text import Detokenizer, StopStrings, Text
from kvstore.gpu_worker.truncation import Turns
from kvstore.keys import ROOT
from kvstore.promptcache import PmlError
from kvstore.types import SESSION_NAME_BYTES_MAX, ChunkKey

T = TypeVar("T")
BODY_BYTES_MAX = 8 << 20
BODY_S = 60.0
"""In which a body has to arrive."""
ADMIN = "admin"
LONG_CHARACTERS = 64 << 10
"""Longer texts have a tokenizer and a thread of their own: megabytes take seconds, for which no short one waits."""
FLUSH_MAX_S = 600.0
FLUSH_SLICE_S = 0.2
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """What can be said after one more token; the last one has the reason why it is the last."""

    text: str
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    finish: str = ""


class Json(Response):
    """Halves of characters, which text from a client may have, go out as they came in: escaped."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        try:
            return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        except UnicodeEncodeError:
            return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


async def _http_error(request: Request, error: Exception) -> Response:
    """No such path, or no such method of it."""
    assert isinstance(error, HTTPException)
    refused = Refused(error.status_code, f"{request.method} {shown(request.url.path)}: {error.detail}")
    return Json(refused.body, status_code=error.status_code, headers=error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    """uvicorn logs it."""
    return Json(Refused(500, "the worker failed at this request: see its log").body, status_code=500)


class Api:
    """One model behind HTTP. `keys`: API keys and whose they are; none: everybody is one tenant."""

    def __init__(
        self,
        service: Service,
        metrics: Metrics,
        text: Text | None,
        *,
        model: str,
        stop_tokens: tuple[int, ...] = (),
        keys: Mapping[str, str] | None = None,
        prompt_cache: PromptCache | None = None,
        close_timeout_s: float = 10.0,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._text = text
        self._model = model
        self._stop_tokens = stop_tokens
        self._keys = {key.encode(): tenant for key, tenant in (keys or {}).items()}
        self._prompt_cache = prompt_cache
        self._close_timeout_s = close_timeout_s
        self._started = started
        self._since = int(time.time())
        self._short = _Lane(lambda: text, "tokenizer")
        self._long = _Lane(lambda: None if text is None else text.another(), "long-texts")

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._answering(self._chat), methods=["POST"]),
                Route("/v1/completions", self._answering(self._completion), methods=["POST"]),
                Route("/v1/models", self._answering(self._models), methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._scrape, methods=["GET"]),
                Route("/flush", self._answering(self._flush), methods=["POST"]),
                Route("/reset", self._answering(self._reset), methods=["POST"]),
                Route("/promptcache", self._answering(self._promptcache), methods=["GET"]),
                Route("/promptcache/verify", self._answering(self._verify), methods=["POST"]),
            ],
            exception_handlers={HTTPException: _http_error, Exception: _bug},
            lifespan=self._life,
        )

    @asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        self._service.start()
        if self._prompt_cache is not None:
            self._prompt_cache.start()
        self._started()
        try:
            yield
        finally:
            if self._prompt_cache is not None:
                await self._prompt_cache.close()
            await self._service.close(self._close_timeout_s)
            self._short.close()
            self._long.close()

    # ------------------------------------------------------------------------------------------------------ calls

    async def _chat(self, request: Request, tenant: str) -> Response:
        body = await _body(request)
        check_model(body, self._model)
        wish = wish_of(body, request.headers)
        if body.get("pml") is not None:
            return await self._modular(request, tenant, wish, body)
        messages = messages_of(body)
        text = self._text
        if text is None or not text.chats:
            raise Refused(400, "the model has no chat template: ask /v1/completions", param="messages")
        characters = sum(len(message["content"]) for message in messages)
        lane = self._lane(text, wish, characters, param="messages")
        try:
            tokens = await unless_gone(request.receive, lane.run(lambda text: text.chat(messages)))
        except ValueError as error:
            raise Refused(400, str(error), param="messages") from None
        turns = None
        if self._cuts(wish, tokens):
            turns = await unless_gone(request.receive, lane.run(lambda text: text.turns(messages)))
        return await self._answer(request, tenant, wish, tokens, chat=True, turns=turns)

    def _cuts(self, wish: Wish, tokens: Sequence[int]) -> bool:
        """Whether this prompt is too long, and goes on with a part of it."""
        truncation = self._service.engine.truncation
        return truncation is not None and wish.cut and len(tokens) > truncation.prompt_tokens

    async def _modular(self, request: Request, tenant: str, wish: Wish, body: Mapping[str, Any]) -> Response:
        """A prompt of modules."""
        cache = self._cache()
        pml = body["pml"]
        if not isinstance(pml, str):
            raise Refused(400, f"pml is {shown(pml)}: must be text", param="pml")
        if body.get("messages"):
            raise Refused(400, "messages go into the prompt, as <user> and the like", param="messages")
        if wish.session:
            raise Refused(400, "a prompt of modules is nobody's session", param="session_id")
        if (recipe := cache.recipe) is None:
            raise Refused(409, cache.refusal, param="pml")
        root = _root(tenant, wish.cache_salt)
        try:
            planned = await self._off_the_loop(partial(cache.prompts.plan, pml, recipe, root))
        except Unavailable:
            raise
        except StoreError as error:
            raise Refused(400, str(error), param="pml") from None
        return await self._answer(request, tenant, wish, list(planned.tokens), chat=True, planned=planned)

    async def _promptcache(self, request: Request, tenant: str) -> Response:
        return Json(self._cache().status)

    async def _verify(self, request: Request, tenant: str) -> Response:
        self._check_admin(tenant)
        body = await _body(request)
        cache = self._cache()
        texts, force = body.get("texts") or [], body.get("force") or False
        if not isinstance(texts, list) or len(texts) > SAMPLES_MAX:
            raise Refused(400, f"texts is a list of at most {SAMPLES_MAX}", param="texts")
        try:
            samples = [Sample.of(row) for row in texts]
            verdict = await unless_gone(
                request.receive,
                cache.verify(
                    self._off_the_loop,
                    samples,
                    kl_max=number_of(body, "kl_max", KL_MAX),
                    perplexity_max=number_of(body, "perplexity_max", PERPLEXITY_MAX),
                    force=bool(force),
                ),
            )
        except (ValueError, PmlError) as error:
            raise Refused(400, str(error), param="texts") from None
        except Exhausted as error:
            raise Refused(429, str(error), headers={"Retry-After": "5"}) from None
        return Json(verdict.body)

    def _cache(self) -> PromptCache:
        if self._prompt_cache is None:
            raise Refused(
                400, "this worker serves no prompts of modules: it has no store, or no tokenizer", param="pml"
            )
        return self._prompt_cache

    async def _completion(self, request: Request, tenant: str) -> Response:
        body = await _body(request)
        check_model(body, self._model)
        if body.get("pml") is not None:
            raise Refused(400, "prompts of modules go to /v1/chat/completions", param="pml")
        wish = wish_of(body, request.headers)
        prompt = prompt_of(body)
        if isinstance(prompt, str):
            if self._text is None:
                raise Refused(400, "the model has no tokenizer: give token ids", param="prompt")
            words = prompt
            lane = self._lane(self._text, wish, len(words), param="prompt")
            try:
                prompt = await unless_gone(request.receive, lane.run(lambda text: text.encode(words)))
            except ValueError as error:
                raise Refused(400, str(error), param="prompt") from None
        return await self._answer(request, tenant, wish, prompt, chat=False)

    async def _models(self, request: Request, tenant: str) -> Response:
        limit = self._service.engine.tokens_max
        model = {"id": self._model, "object": "model", "created": self._since, "owned_by": "kvstore"}
        return Json({"object": "list", "data": [model | {"max_model_len": limit}]})

    async def _health(self, request: Request) -> Response:
        """Without a store a worker computes, and is healthy."""
        service, engine = self._service, self._service.engine
        status = {
            "status": service.failure or "ok",
            "running": engine.running,
            "waiting": engine.waiting,
            "store": "connected" if engine.connected else "none",
            "sharing": engine.refusal or "on",
            "canary": engine.alarm or "ok",
        }
        return Json(status, status_code=503 if service.failure else 200)

    async def _scrape(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def _flush(self, request: Request, tenant: str) -> Response:
        self._check_admin(tenant)
        body = await _body(request)
        timeout_s = number_of(body, "timeout_s", 5.0)
        if timeout_s < 0:
            raise Refused(400, f"timeout_s is {timeout_s}: must be at least 0", param="timeout_s")
        engine = self._service.engine
        flushed = await unless_gone(request.receive, self._flushed(min(timeout_s, FLUSH_MAX_S)))
        return Json({"flushed": flushed, "counters": {**engine.counters, **engine.save_counters}})

    async def _flushed(self, timeout_s: float) -> bool:
        """A thread is taken for a moment at a time: however many wait, others get one, and the end does."""
        until = time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            flushed = await asyncio.to_thread(
                self._service.engine.flush, min(max(0.0, left_s), FLUSH_SLICE_S)
            )
            if flushed or left_s <= FLUSH_SLICE_S:
                return flushed

    async def _reset(self, request: Request, tenant: str) -> Response:
        self._check_admin(tenant)
        body = await _body(request)
        epoch = body.get("epoch")
        if epoch is not None and (type(epoch) is not int or not 0 <= epoch < 1 << 63):
            raise Refused(400, f"epoch is {shown(epoch)}: must be a whole number", param="epoch")
        try:
            await self._service.call(lambda engine: engine.reset(epoch))
        except ValueError as error:
            raise Refused(400, str(error), param="epoch") from None
        return Json({"reset": True})

    def _lane(self, text: Text, wish: Wish, characters: int, *, param: str) -> _Lane:
        """Where words are made tokens of. Raises Refused (400) for more than this worker could take, without a look."""
        engine = self._service.engine
        least = -(-characters // text.characters_per_token)
        if least > engine.tokens_max and not (engine.truncation is not None and wish.cut):
            raise Refused(
                400,
                f"the prompt has {characters} characters, which are more than {least} tokens: this worker takes "
                f"{engine.tokens_max}",
                param=param,
            )
        return self._long if characters > LONG_CHARACTERS else self._short

    async def _off_the_loop(self, what: Callable[[], T]) -> T:
        """On a thread that waits for the daemon's schemas, not for the tokens of others."""
        return await asyncio.to_thread(what)

    # ---------------------------------------------------------------------------------------------------- answers

    async def _answer(
        self,
        request: Request,
        tenant: str,
        wish: Wish,
        tokens: list[int],
        *,
        chat: bool,
        planned: Planned | None = None,
        turns: Turns | None = None,
    ) -> Response:
        engine = self._service.engine
        cut = planned is None and self._cuts(wish, tokens)
        left = engine.tokens_max - (
            0 if cut else len(tokens)
        )  # of one that is cut, the engine says how much is left
        if planned is not None:
            left = min(left, engine.positions_max - planned.end)
        if left < 1 or (wish.max_tokens or 1) > left:
            raise Refused(
                400,
                f"the prompt has {len(tokens)} tokens and {wish.max_tokens or 1} are wanted: this worker takes "
                f"{engine.tokens_max} together",
                param="messages" if chat else "prompt",
            )
        session = f"{tenant}/{wish.session}" if tenant and wish.session else wish.session
        if len(session.encode()) > SESSION_NAME_BYTES_MAX:
            raise Refused(
                400, "a session's name has 1 to 256 bytes, the tenant's included", param="session_id"
            )
        if session.startswith(OWNER_PREFIX):
            raise Refused(400, f"names that begin with {OWNER_PREFIX!r} are of modules", param="session_id")
        ask = Ask(
            tokens=tokens,
            max_new_tokens=wish.max_tokens or left,
            session=session,
            root=_root(tenant, wish.cache_salt),
            sampling=wish.sampling,
            stop_tokens=() if wish.ignore_eos else self._stop_tokens,
            assembly=planned.assembly if planned is not None else None,
            turns=turns,
            cut=cut,
        )
        try:
            job = await unless_gone(request.receive, self._service.submit(ask))
        except ValueError as error:
            raise Refused(400, str(error), param="messages" if chat else "prompt") from None
        except Exhausted as error:
            after = {"Retry-After": str(self._service.retry_after_s)}
            raise Refused(429, str(error), headers=after) from None
        if planned is not None and self._prompt_cache is not None:
            self._prompt_cache.ahead.queued(planned, job)
        geometry = engine.pool.geometry
        token_bytes = geometry.token_bytes * geometry.layers
        words = _Words(self._model, job, wish, chat=chat, token_bytes=token_bytes, planned=planned)
        pieces = self._pieces(job, wish, planned, ask.root)
        if wish.stream:
            return EventStream(_events(words, pieces), closed=partial(self._service.abort, job))
        try:
            return Json(await unless_gone(request.receive, _collected(words, pieces)))
        finally:
            self._service.abort(job)

    async def _pieces(
        self, job: Job, wish: Wish, planned: Planned | None = None, root: ChunkKey = ROOT
    ) -> AsyncGenerator[Piece, None]:
        """Ends the job when it is left, once it was begun."""
        text = self._text.detokenizer() if self._text is not None else None
        stops = StopStrings(wish.stop)
        try:
            async with aclosing(job.outputs()) as outputs:
                async for output in outputs:
                    if output.finish == "error":
                        raise StepFailed("the model's logits are no numbers")
                    if planned is not None and self._prompt_cache is not None:
                        self._prompt_cache.served(planned, job, root)
                        planned = None
                    said = stops.add(_say(text, output.token, last=bool(output.finish)))
                    finish = "stop" if stops.hit else output.finish
                    said += stops.end() if finish and not stops.hit else ""
                    yield Piece(said, (output.token,), (output.gap,), finish)
                    if finish:
                        return
        finally:
            if self._prompt_cache is not None:
                self._prompt_cache.ahead.left(job)
            self._service.abort(job)

    # ------------------------------------------------------------------------------------------------------ callers

    def _answering(
        self, call: Callable[[Request, str], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await call(request, self._tenant(request))
            except Refused as refusal:
                return Json(refusal.body, status_code=refusal.status, headers=refusal.headers or None)
            except Unavailable as error:
                body = Refused(503, str(error)).body
                return Json(body, status_code=503, headers={"Retry-After": "1"})
            except StepFailed as error:
                return Json(Refused(500, str(error)).body, status_code=500)
            except Gone:
                return Response(status_code=499)  # nobody reads it

        return answer

    def _tenant(self, request: Request) -> str:
        """Raises Refused (401)."""
        if not self._keys:
            return ""
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = key.strip().encode(errors="replace") if scheme.lower() == "bearer" else b""
        found = ""
        for known, tenant in self._keys.items():  # all of them, whichever it is
            if hmac.compare_digest(known, given):
                found = tenant
        if not found:
            raise Refused(401, "no API key of this worker was given", headers={"WWW-Authenticate": "Bearer"})
        return found

    def _check_admin(self, tenant: str) -> None:
        if self._keys and tenant != ADMIN:
            raise Refused(403, f"this is for the tenant {ADMIN!r}")


class _Lane:
    """A tokenizer, and the thread that it is used on, which waits for nothing else."""

    def __init__(self, text: Callable[[], Text | None], name: str) -> None:
        """`text` is called on that thread, once it is needed."""
        self._make = text
        self._text: Text | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def __repr__(self) -> str:
        return f"_Lane({self._text!r})"

    async def run(self, what: Callable[[Text], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, what)

    def _run(self, what: Callable[[Text], T]) -> T:
        self._text = self._text or self._make()
        assert self._text is not None, "words are refused where there is no tokenizer"
        return what(self._text)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class _Words:
    """How an answer is worded, as a whole and in pieces."""

    def __init__(
        self,
        model: str,
        job: Job,
        wish: Wish,
        *,
        chat: bool,
        token_bytes: int,
        planned: Planned | None = None,
    ) -> None:
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._job, self._chat, self._wish = job, chat, wish
        self._token_bytes = token_bytes
        self._planned = planned
        self.count = 0
        self.gaps: list[float] = []

    @property
    def usage(self) -> dict[str, Any]:
        request = self._job.request
        prompt_tokens = request.attended_prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.count,
            "total_tokens": prompt_tokens + self.count,
            "prompt_tokens_details": {"cached_tokens": request.reused.tokens}
            | ({"cut_tokens": request.cut_tokens} if request.cut_tokens else {}),
        }

    @property
    def kvstore(self) -> dict[str, Any]:
        """What no standard has a word for."""
        request, reused = self._job.request, self._job.request.reused
        return {
            "ttft_s": self._job.ttft_s,
            "seconds": time.monotonic() - self._job.begun,
            "cached_tokens": {"hbm": reused.hbm, "dram": reused.dram, "ssd": reused.ssd},
            "loaded_bytes": (reused.dram + reused.ssd) * self._token_bytes,
            "load_failures": request.load_failures,
            "choice": request.choice,
            "gaps": [gap if math.isfinite(gap) else None for gap in self.gaps],
        } | ({} if self._planned is None else {"promptcache": served_as(self._planned)})

    def whole(self, text: str, tokens: list[int], finish: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        if self._wish.return_token_ids:
            choice["token_ids"] = tokens
        kind = "chat.completion" if self._chat else "text_completion"
        return self._head | {
            "object": kind,
            "choices": [choice],
            "usage": self.usage,
            "kvstore": self.kvstore,
        }

    def first(self) -> dict[str, Any] | None:
        return self._piece({"delta": {"role": "assistant", "content": ""}}, "") if self._chat else None

    def piece(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"delta": {"content": piece.text}} if self._chat else {"text": piece.text}
        if self._wish.return_token_ids:
            choice["token_ids"] = list(piece.tokens)
        return self._piece(choice, piece.finish)

    def last(self) -> dict[str, Any] | None:
        if not self._wish.include_usage:
            return None
        return self._piece(None, "") | {"usage": self.usage, "kvstore": self.kvstore}

    def _piece(self, choice: dict[str, Any] | None, finish: str) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        end = {"index": 0, "finish_reason": finish or None, "logprobs": None}
        return self._head | {"object": kind, "choices": [] if choice is None else [end | choice]}


async def _collected(words: _Words, pieces: AsyncGenerator[Piece, None]) -> dict[str, Any]:
    text, finish = "", ""
    tokens: list[int] = []
    async with aclosing(pieces):
        async for piece in pieces:
            text += piece.text
            tokens += piece.tokens
            words.gaps += piece.gaps
            finish = piece.finish
    words.count = len(tokens)
    return words.whole(text, tokens, finish)


async def _events(words: _Words, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(pieces):
        try:
            if (first := words.first()) is not None:
                yield _event(first)
            async for piece in pieces:
                words.count += len(piece.tokens)
                words.gaps += piece.gaps
                if piece.text or piece.finish or words._wish.return_token_ids:
                    yield _event(words.piece(piece))
            if (last := words.last()) is not None:
                yield _event(last)
            yield b"data: [DONE]\n\n"
        except (StepFailed, Unavailable) as error:  # the status was sent long ago
            yield _event(Refused(500 if isinstance(error, StepFailed) else 503, str(error)).body)


def _event(message: Mapping[str, Any]) -> bytes:
    return b"data: " + bytes(Json(message).body) + b"\n\n"


def _say(text: Detokenizer | None, token: int, *, last: bool) -> str:
    if text is None:
        return ""
    return text.add(token) + (text.end() if last else "")


def _root(tenant: str, cache_salt: str) -> ChunkKey:
    """What the keys of a tenant's chunks begin with."""
    if not tenant and not cache_salt:
        return ROOT
    state = hashlib.blake2b(digest_size=32, person=b"kvs.tenant.v1")
    for part in (tenant.encode(), cache_salt.encode(errors="surrogatepass")):
        state.update(len(part).to_bytes(8, "little") + part)
    return ChunkKey(state.digest())


async def _body(request: Request) -> dict[str, Any]:
    """Raises Refused (400, 408, 413), and Gone."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > BODY_BYTES_MAX:
                    raise Refused(413, f"a request has at most {BODY_BYTES_MAX >> 20} MiB")
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {BODY_S:.0f} s") from None
    except ClientDisconnect:
        raise Gone from None
    try:
        body = json.loads(b"".join(parts) or b"{}")
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body is no JSON object")
    return body


# ---------------------------------------------------------------------------------------------- clients that go away


class Gone(Exception):
    """The client went away."""


async def unless_gone(receive: Receive, what: Awaitable[T]) -> T:
    """What comes of `what`, which is cancelled when the client goes away: then raises Gone."""
    doing = asyncio.ensure_future(what)
    watching = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({doing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise Gone
    finally:
        for task in (doing, watching):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, for as long as somebody reads them."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, closed: Callable[[], None]) -> None:
        """`closed` is called when nobody reads any more, were it before the first event."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                with suppress(Gone):
                    await unless_gone(receive, self._send(send))
        finally:
            self._closed()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
