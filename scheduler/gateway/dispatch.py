"""Requests that wait, in the order in which they came, and the servers that take them. On one event loop; nothing here
waits but `Ticket.turn`.

A server that fails is *left out*: it gets no requests while another one is there. `health.py` asks it again, and tells
when it is back. An error (500) counts against a server only where another server answered the same request: so a
request that fails everywhere leaves out nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

WAITING_BYTES_MAX = 1 << 30
"""Of the bodies of all requests that wait."""
SESSIONS_MAX = 16_384
"""Of so many sessions it is remembered which server had them last."""
BEHIND_ONE_MS = 20.0
"""What a request that runs at a server already costs the next one there, beside the time to bring its KV."""
OUT_S = 2.0
"""A server is left out for so long; twice as long each time, if it fails again before it has answered a request."""
OUT_S_MAX = 60.0
ERRORS_MAX = 3
"""Errors in a row after which a server is left out."""
log = logging.getLogger(__name__)


class Failure(StrEnum):
    """Why a server is left out."""

    UNREACHABLE = "unreachable"
    BROKE_OFF = "broke_off"
    TAKES_NOTHING = "takes_nothing"
    ERRORS = "errors"
    SILENT = "silent"


SAID = {
    Failure.UNREACHABLE: "it cannot be reached",
    Failure.BROKE_OFF: "it broke off a request",
    Failure.TAKES_NOTHING: "it says that it takes nothing now",
    Failure.ERRORS: f"it answered {ERRORS_MAX} requests in a row with errors that other servers answered without",
    Failure.SILENT: "it is silent",
}


@dataclass(slots=True, eq=False)
class Server:
    url: str
    slots: int
    """Requests that it is given at a time: more would wait there, where nobody can look ahead."""
    tickets: set[Ticket] = field(default_factory=set)
    """Requests that it has."""
    left_out: Failure | None = None
    ask_at: float = 0.0
    """Of a server that is left out: when it is asked again, by the loop's clock."""
    went_out: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while it is left out."""
    on_trial: bool = False
    """It is back, and gets one request at a time until it has answered one."""
    outages: int = 0
    """How often it was left out since it last answered a request."""
    errors: int = 0
    """In a row, of requests that another server answered."""
    heard_at: float = 0.0
    """When a piece of any answer came last, by the loop's clock."""
    answered: int = 0
    failed: int = 0
    errors_in_all: int = 0
    """Answers with a status of 500 or more."""
    outages_in_all: Counter[Failure] = field(default_factory=Counter)
    node: str = ""
    """Whose store it uses, where there are several; see `Ticket.costs`."""
    taken_in: int = 0
    """Bytes of requests that were new to it, as far as sessions tell: what its caches and its store had to make room
    for."""

    @property
    def up(self) -> bool:
        return self.left_out is None

    @property
    def running(self) -> int:
        return len(self.tickets)

    @property
    def has_room(self) -> bool:
        return self.running < (1 if self.on_trial else self.slots)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client sent."""

    path: str
    data: bytes
    """Its body, which the server gets as it is."""
    body: dict[str, Any]
    """The same, read."""
    headers: Sequence[tuple[bytes, bytes]] = ()
    """Those that the server gets: who asks, and under which trace."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request, from its arrival to its end."""

    number: int
    asked: Asked
    session: str
    turn: asyncio.Future[Server]
    """Done with its first turn; a second one, elsewhere, is another future."""
    server: Server | None = None
    """The one of whose slots it has one."""
    lost: asyncio.Future[None] | None = None
    """Done when that server has gone silent, and another one is there. Nobody looks once it has begun to answer."""
    tried: set[str] = field(default_factory=set)
    """Servers that could not be reached for it, or did not take it."""
    erred: list[Server] = field(default_factory=list)
    """Those that answered it with an error."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """By node: milliseconds until its DRAM has what any node's has of the prompt. Of a node that is missing nothing is
    known."""


class Full(Exception):
    """Too many wait, or too much."""


class Silent(Exception):
    """All servers that are left for a request are silent."""


class Dispatcher:
    def __init__(self, servers: list[Server], *, waiting_max: int) -> None:
        self.servers = servers
        self._waiting_max = waiting_max
        self._waiting: deque[Ticket] = deque()
        self._numbers = itertools.count()
        self._last: OrderedDict[str, tuple[Server, int]] = OrderedDict()
        """The server that had a session last, whose own cache may still have its beginning, and the bytes of that
        request."""
        self.on_wait: Callable[[Ticket], None] = lambda ticket: None
        self.on_leave: Callable[[Ticket], None] = lambda ticket: None
        """A ticket that waited got its turn, or gave up."""

    def __repr__(self) -> str:
        running = ", ".join(f"{server.running}/{server.slots}" for server in self.servers)
        return f"Dispatcher({len(self._waiting)} waiting, running {running})"

    @property
    def waiting(self) -> Iterator[Ticket]:
        return iter(self._waiting)

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def enter(self, asked: Asked, session: str, costs: Mapping[str, float] | None = None) -> Ticket:
        """A request; its turn may have come already. Its turn raises Silent. Raises Full."""
        waiting_bytes = sum(len(each.asked.data) for each in self._waiting)
        if len(self._waiting) >= self._waiting_max or waiting_bytes + len(asked.data) > WAITING_BYTES_MAX:
            raise Full
        turn: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        ticket = Ticket(next(self._numbers), asked, session, turn, costs=costs or {})
        self._waiting.append(ticket)
        self._serve()
        if not turn.done():
            self.on_wait(ticket)
        return ticket

    # ----------------------------------------------------------------------------------- servers that fail

    def leave_out(self, server: Server, failure: Failure) -> None:
        """It failed, or still does; requests that it has not begun to answer go elsewhere if it is silent."""
        now = asyncio.get_running_loop().time()
        if server.left_out is None:
            server.outages += 1
            server.outages_in_all[failure] += 1
            out_s = min(OUT_S * 2 ** min(server.outages - 1, 16), OUT_S_MAX)
            server.ask_at = now + out_s
            log.warning("%s is left out: %s; it is asked again in %.0f s", server.url, SAID[failure], out_s)
        elif server.ask_at <= now:
            server.ask_at = now + OUT_S
        server.left_out = failure
        server.went_out.set()
        self._leave_the_silent()
        self._serve()

    def is_back(self, server: Server) -> None:
        """It answers again. Those that wait may have it, though nobody else comes or leaves."""
        log.warning("%s is back", server.url)
        server.on_trial |= server.left_out in (Failure.ERRORS, Failure.SILENT)
        server.left_out = None
        server.errors = 0
        server.went_out.clear()
        self._leave_the_silent()
        self._serve()

    def heard(self, server: Server) -> None:
        """A piece of an answer came from it."""
        server.heard_at = asyncio.get_running_loop().time()

    def errs(self, ticket: Ticket) -> None:
        """Its server answered with an error, which may be the request's own: it is the next to have a turn
        elsewhere."""
        assert ticket.server is not None, ticket
        ticket.erred.append(ticket.server)
        self.again(ticket, None)

    def answered(self, ticket: Ticket) -> None:
        """Its server answered: what other ones answered it with was errors of theirs."""
        server = ticket.server
        assert server is not None, ticket
        server.errors = server.outages = 0
        if server.on_trial:
            server.on_trial = False
            self._serve()
        for other in ticket.erred:
            other.errors += 1
            if other.up and (other.on_trial or other.errors >= ERRORS_MAX):
                self.leave_out(other, Failure.ERRORS)
        ticket.erred.clear()

    def _leave_the_silent(self) -> None:
        for server in self.servers:
            if server.left_out is Failure.SILENT:
                for ticket in server.tickets:
                    assert ticket.lost is not None, ticket
                    if not ticket.lost.done() and self.others(ticket, up=True):
                        ticket.lost.set_result(None)

    def others(self, ticket: Ticket, *, up: bool = False) -> bool:
        """Whether there is a server that was not tried for it, beside the one it has, and that may answer; `up`: that
        is not left out."""
        return any(
            other is not ticket.server
            and other.url not in ticket.tried
            and (other.up if up else other.left_out is not Failure.SILENT)
            for other in self.servers
        )

    def again(self, ticket: Ticket, failure: Failure | None) -> bool:
        """Its server failed so (None: that is not sure): it is the next to have a turn elsewhere. False: there is no
        other one."""
        server = ticket.server
        assert server is not None, ticket
        server.failed += failure is not None
        more = self.others(ticket)
        ticket.tried.add(server.url)
        self._let_go(ticket)
        if failure is not None:
            self.leave_out(server, failure)
        if more:
            ticket.turn = asyncio.get_running_loop().create_future()
            self._waiting.appendleft(ticket)
        self._serve()
        return more

    # ---------------------------------------------------------------------------------------------- turns

    def leave(self, ticket: Ticket) -> None:
        """It was answered, or whoever asked is gone."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self.on_leave(ticket)
        ticket.turn.cancel()
        self._let_go(ticket)
        self._serve()

    def _let_go(self, ticket: Ticket) -> None:
        if ticket.server is not None:
            ticket.server.tickets.discard(ticket)
            ticket.server = None

    def _serve(self) -> None:
        for ticket in list(self._waiting):
            if not self.others(ticket):
                self._waiting.remove(ticket)
                ticket.turn.set_exception(Silent())
                self.on_leave(ticket)
                continue
            server = self._server_for(ticket)
            if server is None:
                if any(other.has_room for other in self.servers):
                    continue  # it cannot have that one, somebody behind it can
                return
            self._waiting.remove(ticket)
            server.tickets.add(ticket)
            ticket.server = server
            ticket.lost = asyncio.get_running_loop().create_future()
            if ticket.session:
                self._remember(ticket.session, server, len(ticket.asked.data))
            ticket.turn.set_result(server)
            self.on_leave(ticket)

    def _remember(self, session: str, server: Server, size: int) -> None:
        last, before = self._last.get(session, (None, 0))
        server.taken_in += max(0, size - before) if last is server else size
        self._last[session] = server, size
        self._last.move_to_end(session)
        if len(self._last) > SESSIONS_MAX:
            self._last.popitem(last=False)

    def _server_for(self, ticket: Ticket) -> Server | None:
        """Of those that are up, if any is, else of those that are not silent: the one that had the session last, else
        the one with the most room. Where it is known what the prompt's KV costs each node: the one where that and the
        requests before it take least. Where all this is the same a new session goes to the server that took in least,
        whose store has to evict least for it; a request without a session to the first, which had those before it."""
        left = [server for server in self.servers if server.url not in ticket.tried]
        if any(server.up for server in left):
            left = [server for server in left if server.up]
        free = [server for server in left if server.has_room and server.left_out is not Failure.SILENT]
        last, _ = self._last.get(ticket.session, (None, 0))
        costs = ticket.costs
        dearest = max(costs.values(), default=0.0)

        def dearness(server: Server) -> tuple[float, bool, int, int]:
            ahead_ms = BEHIND_ONE_MS * server.running if costs else 0.0
            return (
                costs.get(server.node, dearest) + ahead_ms,
                server is not last,
                server.running - server.slots,
                server.taken_in if ticket.session else 0,
            )

        return min(free, key=dearness, default=None)
