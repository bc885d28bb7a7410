"""From a call over TCP to the worker that makes it: identity, role and rate."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kvstore import wire
from kvstore.errors import Denied, Unauthenticated, Unavailable
from kvstore.transport import audit
from kvstore.transport.access import LOOK_S, Access
from kvstore.transport.callers import CLIENT_METADATA, TcpCallers
from kvstore.transport.roles import ROLES
from kvstore.transport.rpc import Context
from kvstore.types import WorkerId


class TcpDoor:
    """Called on the asyncio thread."""

    def __init__(self, access: Access, callers: TcpCallers) -> None:
        self.access = access
        self._callers = callers

    def caller(self, context: Context, method: str) -> WorkerId:
        """The worker that calls `method` ("Service/Method"). Raises Unauthenticated, Denied, BadRequest, Exhausted,
        Unavailable."""
        metadata = context.invocation_metadata() or ()
        if any(key == wire.TOKEN_METADATA for key, _ in metadata):
            raise Unauthenticated(
                "tokens of the descriptor socket are for callers on this machine",
                field=wire.TOKEN_METADATA,
                value="hidden",
                remedy="call by the socket in run_dir, or leave it out",
            )
        identity = self.access.identify(context)
        roles = ROLES.get(method, frozenset())
        if not identity.may(roles):
            denied = Denied(
                f"{identity.name} may not call {method}",
                field="roles",
                value=", ".join(sorted(identity.roles)),
                remedy="roles that may: " + (", ".join(sorted(roles)) or "none over TCP"),
            )
            audit.refused(method, {"identity": identity.name, "peer": context.peer()}, denied)
            raise denied
        self.access.rates.call(identity.tenant)
        client = b""
        for key, value in metadata:
            if key == CLIENT_METADATA:
                client = value if isinstance(value, bytes) else value.encode()
        return self._callers.worker_of(context.peer(), identity, client)

    def tenant_of(self, worker: WorkerId) -> str:
        return self._callers.identity_of(worker).tenant

    def who(self, worker: WorkerId) -> Mapping[str, object]:
        """For the audit log; empty: it is none of those who call over TCP, or has left."""
        return self._callers.who(worker)

    async def carry(self, context: Context, worker: WorkerId, size: int) -> None:
        """Count `size` bytes, wait until the tenant may go on. Raises Unauthenticated, or Unavailable, when the
        identity has ended meanwhile."""
        self.access.identify(context)
        if worker not in self._callers:
            raise Unavailable(
                "the identity of this call has ended", remedy="ask for a new token, and call again"
            )
        await self.access.rates.carry(self.tenant_of(worker), size)

    def check(self, context: Context) -> None:
        """Raises Unauthenticated for a caller over TCP without an identity."""
        self.access.identify(context)

    async def watch(self) -> None:
        """Read the access file again when it changes, and let go of who is not in it any more. For ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.access.look()
            self._callers.drop(self.access.still)

    def close(self) -> None:
        self._callers.close()
