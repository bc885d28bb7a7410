"""Requests that wait, in the order in which they came, and the servers that take them. On one event loop; nothing here
waits but `Ticket.turn`."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SESSIONS_MAX = 16_384
"""Of so many sessions it is remembered which server had them last."""
BEHIND_ONE_MS = 20.0
"""What a request that runs at a server already costs the next one there, beside the time to bring its KV."""
DOWN_S = 2.0
"""A server that could not be reached, or took nothing, is not asked for so long, unless none is left."""


@dataclass(slots=True, eq=False)
class Server:
    url: str
    slots: int
    """Requests that it is given at a time: more would wait there, where nobody can look ahead."""
    running: int = 0
    back: asyncio.TimerHandle | None = None
    """Of a server that is down: when it is asked again."""
    answered: int = 0
    failed: int = 0
    node: str = ""
    """Whose store it uses, where there are several; see `Ticket.costs`."""
    taken_in: int = 0
    """Bytes of requests that were new to it, as far as sessions tell: what its caches and its store had to make room
    for."""

    @property
    def up(self) -> bool:
        return self.back is None


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client sent."""

    path: str
    data: bytes
    """Its body, which the server gets as it is."""
    body: dict[str, Any]
    """The same, read."""
    headers: Mapping[bytes, bytes] = field(default_factory=dict)
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
    tried: set[str] = field(default_factory=set)
    """Servers that could not be reached for it, or did not take it."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """By node: milliseconds until its DRAM has what any node's has of the prompt. Of a node that is missing nothing is
    known."""

    @property
    def name(self) -> bytes:
        return b"%d" % self.number


class Full(Exception):
    """Too many wait."""


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
        """A request; its turn may have come already. Raises Full."""
        if len(self._waiting) >= self._waiting_max:
            raise Full
        turn: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        ticket = Ticket(next(self._numbers), asked, session, turn, costs=costs or {})
        self._waiting.append(ticket)
        self._serve()
        if not turn.done():
            self.on_wait(ticket)
        return ticket

    def broke(self, server: Server) -> None:
        """It could not be reached, took nothing, or broke off an answer."""
        server.failed += 1
        if server.back is not None:
            server.back.cancel()
        server.back = asyncio.get_running_loop().call_later(DOWN_S, self._is_back, server)

    def _is_back(self, server: Server) -> None:
        """Those that wait may have it again, though nobody else comes or leaves."""
        server.back = None
        self._serve()

    def others(self, ticket: Ticket) -> bool:
        """Whether there is a server that was not tried for it, beside the one it has."""
        return any(other is not ticket.server and other.url not in ticket.tried for other in self.servers)

    def again(self, ticket: Ticket) -> bool:
        """Its server could not be reached, or takes nothing: it is the next to have a turn elsewhere. False: all were
        tried."""
        server = ticket.server
        assert server is not None, ticket
        self.broke(server)
        more = self.others(ticket)
        ticket.tried.add(server.url)
        self._let_go(ticket)
        if more:
            ticket.turn = asyncio.get_running_loop().create_future()
            self._waiting.appendleft(ticket)
        self._serve()
        return more

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
            ticket.server.running -= 1
            ticket.server = None

    def _serve(self) -> None:
        for ticket in list(self._waiting):
            server = self._server_for(ticket)
            if server is None:
                if any(other.running < other.slots for other in self.servers):
                    continue  # it cannot have that one, somebody behind it can
                return
            self._waiting.remove(ticket)
            server.running += 1
            ticket.server = server
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
        """Of those that are up, if any is: the one that had the session last, else the one with the most room. Where
        it is known what the prompt's KV costs each node: the one where that and the requests before it take least.
        Where all this is the same a new session goes to the server that took in least, whose store has to evict least
        for it; a request without a session to the first, which had those before it."""
        free = [
            server
            for server in self.servers
            if server.running < server.slots and server.url not in ticket.tried
        ]
        if any(server.up for server in self.servers):
            free = [server for server in free if server.up]
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
