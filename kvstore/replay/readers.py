"""Readers of published trace formats. Each takes a path, plain or compressed with zstd or gzip, and gives a `Trace`.

    mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids (prefix-chained blocks of 512 tokens)
    agentic   JSON lines, a session each: requests with t (s), in, out and h = [[first block, count], ...], blocks local
              to the session; sub-agents nested. Sessions have no start times: Poisson arrivals are drawn
    sharegpt  JSON lines, a conversation each: turns = [[user tokens, assistant tokens], ...]. No times at all: Poisson
              arrivals and think times are drawn (AttentionStore, section 4.1)
    azure     CSV: TIMESTAMP, ContextTokens, GeneratedTokens; no sessions, so nothing is ever met again
    lmcache   JSON lines: timestamp (us), session_id, input and output as text
    recorded  what `kvctl record` had the daemon write (`server/recorder.py`)

What is drawn comes from a seed, the same for all policies that are compared.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kvstore.errors import BadRequest
from kvstore.replay import rows
from kvstore.replay.trace import Trace, Turn, numbers

MOONCAKE_CHUNK_TOKENS = 512
AGENTIC_BLOCK_TOKENS = 64
CHUNK_TOKENS = 64
SECONDS_PER_OUTPUT_TOKEN = 0.03
THINK_MEDIAN_S = 40.0
THINK_SIGMA = 1.0
"""Of the logarithm: two thirds of all think times are between 0.37 and 2.7 times the median."""
OPEN_MAX = 16
LOAD_MS = 60_000
ORDER_MS = 1_000
"""Of a recording; see `Recorded`."""
NAMESPACES_SHOWN_MAX = 8
BYTES_PER_TOKEN = 4
"""Of text of which nobody says how it is cut into tokens."""


def _spread(turns: list[Turn]) -> None:
    """Turns with one time stand for a step of a coarse clock: they are spread evenly over it."""
    start = step = 0
    while start < len(turns):
        end = start + 1
        while end < len(turns) and turns[end].at_ms == turns[start].at_ms:
            end += 1
        step = turns[end].at_ms - turns[start].at_ms if end < len(turns) else step
        for number in range(start, end):
            turns[number].at_ms += step * (number - start) // (end - start)
        start = end


class Continued:
    """Sessions of traces that name none: a session goes on where a prompt begins with chunks of its earlier ones, more
    than one of them, for a system prompt in common makes no session."""

    def __init__(self) -> None:
        self._turns: dict[int, tuple[int, int]] = {}
        """By chunk: whose it was last, and in which turn."""

    def of(self, new: int, chunks: Sequence[int], whole: Sequence[int]) -> tuple[int, int]:
        """(session, number of the turn in it); `new` names one that begins. `whole` chunks can be met again."""
        known = next((n for n in range(len(chunks), 0, -1) if chunks[n - 1] in self._turns), 0)
        session, before = self._turns[chunks[known - 1]] if known > 1 else (new, -1)
        for chunk in whole:
            self._turns[chunk] = (session, before + 1)
        return session, before + 1


def mooncake(path: str | Path, *, chunk_tokens: int = MOONCAKE_CHUNK_TOKENS) -> Trace:
    """A session is not named: it is taken to go on where a prompt begins with all whole chunks of an earlier one. The
    trace says nothing of the answer's chunks; they are met again as parts of later prompts."""
    turns: list[Turn] = []
    sessions = Continued()
    needed = {"timestamp": rows.time, "input_length": rows.tokens, "hash_ids": rows.numbers}

    def check(row: dict[str, Any]) -> None:
        blocks, tokens = len(row["hash_ids"]), row["input_length"]
        if blocks not in (tokens // chunk_tokens, -(-tokens // chunk_tokens)):
            raise rows.Refused(
                f"hash_ids has {blocks:,} blocks; {tokens:,} tokens of input_length have"
                f" {-(-tokens // chunk_tokens):,} of {chunk_tokens}",
                "say how long the trace's blocks are: --option chunk_tokens=N",
            )

    for row in rows.lines(path, needed, {"output_length": (rows.tokens, 0)}, of="mooncake", check=check):
        chunks = row["hash_ids"]
        session, number = sessions.of(len(turns), chunks, chunks[: row["input_length"] // chunk_tokens])
        turns.append(
            Turn(
                int(row["timestamp"]),
                numbers(chunks),
                row["input_length"],
                row["output_length"],
                (),
                session,
                number,
            )
        )
    trace = Trace("mooncake", chunk_tokens, turns)
    _spread(trace.turns)
    trace.note_history()
    return trace


def _requests(value: Any) -> list[dict[str, Any]]:
    """Of a session, or of a sub-agent. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"is no list: {rows.shown(value)}")
    alone = {"t": rows.time, "in": rows.tokens, "out": rows.tokens, "h": rows.runs}
    nested = {"t": rows.time, "requests": _requests}
    return [
        rows.checked(each, nested if isinstance(each, dict) and "requests" in each else alone)
        for each in value
    ]


def agentic(
    path: str | Path,
    *,
    rate: float = 0.05,
    seed: int = 1,
    sessions: int = 0,
    chunk_tokens: int = 512,
) -> Trace:
    """`rate`: sessions that begin in a second. `chunk_tokens`: so many blocks of 64 make a chunk; a chunk is named by
    its last block, which stands for all before it."""
    if chunk_tokens % AGENTIC_BLOCK_TOKENS:
        raise BadRequest(
            f"must be a multiple of {AGENTIC_BLOCK_TOKENS}", field="chunk_tokens", value=chunk_tokens
        )
    each = chunk_tokens // AGENTIC_BLOCK_TOKENS
    chance = random.Random(seed)
    begins = 0.0
    turns: list[Turn] = []
    next_session = 0
    next_chunk = 0
    for row in rows.lines(path, {"requests": _requests}, of="agentic"):
        if sessions and next_session >= sessions:
            break
        begins += chance.expovariate(rate)
        known: dict[int, int] = {}
        todo = [(begins, next_session, row["requests"])]
        while todo:
            started, session, requests = todo.pop()
            next_session = max(next_session, session + 1)
            count = 0
            for request in requests:
                if "requests" in request:
                    next_session += 1
                    todo.append((started + request["t"], next_session - 1, request["requests"]))
                    continue
                blocks = request["h"]
                ends = [*blocks[each - 1 :: each], *(blocks[-1:] if len(blocks) % each else ())]
                chunks: list[int] = []
                for end in ends:
                    if end not in known:
                        known[end] = next_chunk
                        next_chunk += 1
                    chunks.append(known[end])
                turns.append(
                    Turn(
                        int((started + request["t"]) * 1000),
                        numbers(chunks),
                        request["in"],
                        request["out"],
                        (),
                        session,
                        count,
                    )
                )
                count += 1
    trace = Trace("agentic", chunk_tokens, turns)
    trace.note_history()
    return trace


def sharegpt(
    path: str | Path,
    *,
    sessions: int = 9_000,
    rate: float = 1.0,
    think_median_s: float = THINK_MEDIAN_S,
    sigma: float = THINK_SIGMA,
    seed: int = 1,
    chunk_tokens: int = CHUNK_TOKENS,
    window: int = 0,
    invalidates: bool = False,
) -> Trace:
    """`rate` sessions begin in a second; the next turn comes 30 ms for each token of the answer later, and a think time
    later: lognormal with the median `think_median_s`. `window` > 0: a conversation that outgrows so many tokens loses
    the earlier half of them (section 3.4); `invalidates`: what is left has other positions, hence other chunks."""
    if 0 < window < 2 * chunk_tokens:
        raise BadRequest("must be 0 or hold two chunks", field="--option window", value=window)
    chance = random.Random(seed)
    begins = 0.0
    turns: list[Turn] = []
    next_chunk = 0
    for session, row in enumerate(rows.lines(path, {"turns": rows.pairs}, of="sharegpt")):
        if sessions and session >= sessions:
            break
        begins += chance.expovariate(rate)
        at_s = begins
        chunks: list[int] = []
        tokens = 0
        think_s = -0.001
        for number, (asked, answered) in enumerate(row["turns"]):
            asked = max(1, asked)
            if window:
                asked, answered = min(asked, window // 2), min(answered, window // 2)
                while tokens + asked + answered > window and tokens:
                    cut = min(window // 2 // chunk_tokens, len(chunks))
                    tokens = max(0, tokens - cut * chunk_tokens) if cut else 0
                    left = tokens // chunk_tokens
                    chunks = chunks[cut:]
                    if invalidates:
                        chunks = list(range(next_chunk, next_chunk + left))
                        next_chunk += left
            history = len(chunks)
            tokens += asked
            prompt = tokens // chunk_tokens - len(chunks)
            chunks += range(next_chunk, next_chunk + prompt)
            next_chunk += prompt
            tokens += answered
            rest = tokens // chunk_tokens - len(chunks)
            answer = range(next_chunk, next_chunk + rest)
            next_chunk += rest
            turns.append(
                Turn(
                    int(at_s * 1000),
                    numbers(chunks),
                    tokens - answered,
                    answered,
                    numbers(answer),
                    session,
                    number,
                    history,
                    int(think_s * 1000),
                )
            )
            chunks += answer
            think_s = chance.lognormvariate(math.log(think_median_s), sigma)
            at_s += answered * SECONDS_PER_OUTPUT_TOKEN + think_s
    return Trace("sharegpt", chunk_tokens, turns)


def _moment(value: str) -> datetime:
    """Without a zone, down to the microsecond. Raises ValueError."""
    try:
        return datetime.fromisoformat(value[:26]).replace(tzinfo=None)
    except ValueError:
        raise ValueError(f"is no time: {value[:40]!r}") from None


def azure(path: str | Path, *, chunk_tokens: int = CHUNK_TOKENS) -> Trace:
    turns: list[Turn] = []
    start: datetime | None = None
    next_chunk = 0
    tokens = rows.written(rows.tokens)
    needed = {"TIMESTAMP": _moment, "ContextTokens": tokens, "GeneratedTokens": tokens}
    for number, row in enumerate(rows.table(path, needed, of="azure")):
        start = start or row["TIMESTAMP"]
        at_ms = int((row["TIMESTAMP"] - start).total_seconds() * 1000)
        asked = row["ContextTokens"]
        count = asked // chunk_tokens
        chunks = numbers(range(next_chunk, next_chunk + count))
        next_chunk += count
        turns.append(Turn(at_ms, chunks, asked, row["GeneratedTokens"], (), number))
    return Trace("azure", chunk_tokens, turns)


def lmcache(path: str | Path, *, chunk_tokens: int = 16) -> Trace:
    """Text is cut every four bytes: of a token only its place counts here."""
    turns: list[Turn] = []
    known: dict[bytes, int] = {}
    sessions: dict[Any, tuple[int, int]] = {}
    start: int | None = None
    size = chunk_tokens * BYTES_PER_TOKEN
    needed = {"timestamp": rows.time, "input": rows.text, "session_id": rows.named}
    for row in rows.lines(path, needed, {"output": (rows.text, "")}, of="lmcache"):
        at = int(row["timestamp"])
        start = at if start is None else start
        text, digest = row["input"].encode("utf-8", "surrogatepass"), b""
        chunks: list[int] = []
        for offset in range(0, len(text) - size + 1, size):
            digest = hashlib.blake2b(digest + text[offset : offset + size], digest_size=16).digest()
            chunks.append(known.setdefault(digest, len(known)))
        session, number = sessions.get(row["session_id"], (len(sessions), 0))
        sessions[row["session_id"]] = (session, number + 1)
        turns.append(
            Turn(
                (at - start) // 1000,
                numbers(chunks),
                -(-len(text) // BYTES_PER_TOKEN),
                len(row["output"].encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN,
                (),
                session,
                number,
            )
        )
    trace = Trace("lmcache", chunk_tokens, turns)
    trace.note_history()
    return trace


class _Open:
    """A turn that may go on."""

    __slots__ = ("_chunks", "_named", "turn")

    def __init__(self, turn: Turn, worker: int) -> None:
        """`worker` began it."""
        self.turn = turn
        self._chunks = {*turn.chunks}
        """And its answer's."""
        self._named: dict[int, set[int]] = {worker: {*turn.chunks}}
        """What each worker has asked for of its prompt: it asks again in another turn only."""

    def widened(self, turn: Turn, worker: int) -> _Open | None:
        """The same, as far as its prompt is `turn`'s; None: `worker` had its say, or it is another prompt."""
        if worker in self._named or not _is_part(self.turn.chunks, turn.chunks):
            return None
        wider = _Open(turn, worker)
        wider.answer(self.turn.answer)
        wider._named |= self._named
        return wider

    def goes_on(self, chunks: Sequence[int], worker: int) -> bool:
        """Whether these are some of its prompt, one after the other, that the worker has yet to ask for."""
        named = self._named.get(worker, set())
        if chunks[0] not in self._chunks or chunks[0] in named or not _is_part(chunks, self.turn.chunks):
            return False
        self._named[worker] = named.union(chunks)
        return True

    def has(self, chunks: Sequence[int]) -> bool:
        """Any of them."""
        return not self._chunks.isdisjoint(chunks)

    def answer(self, saved: Sequence[int]) -> None:
        new = [chunk for chunk in saved if chunk not in self._chunks]
        if new:
            self._chunks.update(new)
            self.turn.answer = numbers([*self.turn.answer, *new])


class Recorded:
    """Turns out of the lines of a recording, of one namespace, as they come. A turn is whole when its engine has begun
    OPEN_MAX others; what was saved behind its chunks, and not asked for, is its answer.

    Of one engine, a process may look a prompt up and others load it: what another worker of the group asks for, and is
    part of a prompt of the last LOAD_MS, is no turn. Nor is it when it is told first, within ORDER_MS."""

    def __init__(self) -> None:
        self.chunk_tokens = self.chunk_bytes = 0
        """As of the last line."""
        self._open: dict[tuple[str, int], list[_Open]] = {}
        """By group; in recordings that know none, by worker. The oldest first."""
        self._count = 0
        self._sessions = Continued()

    def take(self, line: Mapping[str, Any]) -> Turn | None:
        """The turn that this line ends, if it ends one."""
        self.chunk_tokens, self.chunk_bytes = int(line["c"]), int(line["b"])
        worker = int(line["w"])
        mine = self._open.setdefault(("g", int(line["g"])) if "g" in line else ("w", worker), [])
        if "ask" not in line:
            self._save(mine, line["save"], line.get("after", 0))
            return None
        now, chunks = int(line["t"]), line["ask"]
        if not chunks or any(now <= one.turn.at_ms + LOAD_MS and one.goes_on(chunks, worker) for one in mine):
            return None
        for place, one in enumerate(mine):
            before = one.turn
            if now > before.at_ms + ORDER_MS:
                continue
            wider = one.widened(self._turn(before.at_ms, chunks, before.session, before.number), worker)
            if wider is not None:
                self._sessions.of(before.session, chunks, chunks)
                mine[place] = wider
                return None
        session, number = self._sessions.of(self._count, chunks, chunks)
        mine.append(_Open(self._turn(now, chunks, session, number), worker))
        self._count += 1
        return mine.pop(0).turn if len(mine) > OPEN_MAX else None

    def _turn(self, at_ms: int, chunks: Sequence[int], session: int, number: int) -> Turn:
        return Turn(at_ms, numbers(chunks), len(chunks) * self.chunk_tokens, 0, (), session, number)

    @staticmethod
    def _save(mine: Sequence[_Open], saved: Sequence[int], after: int) -> None:
        """Of the newest turn that has some of it, or what it follows; else of the newest."""
        newest = mine[::-1]
        for wanted in (saved, (after,)):
            for one in newest:
                if one.has(wanted):
                    one.answer(saved)
                    return
        if newest:
            newest[0].answer(saved)

    def rest(self) -> list[Turn]:
        """Those that nothing has ended."""
        left = [one.turn for mine in self._open.values() for one in mine]
        self._open.clear()
        return left


def _is_part(chunks: Sequence[int], of: Sequence[int]) -> bool:
    """Whether these are some of the others, one after the other."""
    if chunks[0] not in of:
        return False
    start = of.index(chunks[0])
    return list(of[start : start + len(chunks)]) == list(chunks)


def recorded(path: str | Path, *, namespace: int = -1) -> Trace:
    """One `namespace` (its number in the file); -1: the one with most lookups. The file names no tokens: prompts count
    as whole chunks."""
    needed = {"n": rows.number, "w": rows.number, "c": rows.counted, "b": rows.counted}
    either: dict[str, tuple[rows.Kind, Any]] = {"g": (rows.number, None), "after": (rows.number, None)}
    either |= {"ask": (rows.numbers, None), "save": (rows.numbers, None)}
    found = rows.lines(path, needed | {"t": rows.time}, either, of="recorded", if_has=("ask", "save"))
    lines = [{name: value for name, value in line.items() if value is not None} for line in found]
    counts = Counter(line["n"] for line in lines if line.get("ask"))
    chosen = counts.most_common(1)[0][0] if counts and namespace < 0 else namespace
    reader = Recorded()
    mine = [line for line in lines if line["n"] == chosen]
    turns = [turn for turn in map(reader.take, mine) if turn is not None] + reader.rest()
    if not turns:
        known = sorted({line["n"] for line in lines if line.get("ask")})[:NAMESPACES_SHOWN_MAX]
        raise BadRequest(
            "holds no lookup" + (f" of namespace {namespace}" if namespace >= 0 else ""),
            field="trace",
            value=str(path),
            remedy=f"--option namespace={known[0]}; known: {', '.join(map(str, known))}"
            if known
            else "record for longer, while an engine asks (kvctl record), or name another --format",
        )
    trace = Trace("recorded", reader.chunk_tokens, turns)
    trace.note_history()
    return trace


FORMATS: Mapping[str, Callable[..., Trace]] = {
    "mooncake": mooncake,
    "agentic": agentic,
    "sharegpt": sharegpt,
    "azure": azure,
    "lmcache": lmcache,
    "recorded": recorded,
}


def read_trace(path: str | Path, format: str, /, **options: Any) -> Trace:
    """A trace file as the reader of `format` understands it; `options` are the reader's. Raises BadRequest, OSError."""
    if format not in FORMATS:
        raise BadRequest(
            "no such format", field="format", value=format, remedy="known: " + ", ".join(FORMATS)
        )
    known = {
        name: parameter.annotation
        for name, parameter in inspect.signature(FORMATS[format]).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    for name, value in options.items():
        if name not in known:
            raise BadRequest(
                f"{format} has no such option",
                field="--option",
                value=name,
                remedy="known: " + ", ".join(known),
            )
        options[name] = rows.option(name, known[name], value)
    trace = FORMATS[format](path, **options)
    if not trace.turns:
        raise BadRequest("holds no turn", field="trace", value=str(path), remedy="another file, or --format")
    return trace
