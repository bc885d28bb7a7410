"""gRPC service Fleet: routes, nodes, and orders to drain. Answered from what this node knows."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from kvstore import wire
from kvstore.core import events
from kvstore.core.events import Ticket
from kvstore.core.requests.reads import lookup
from kvstore.errors import BadRequest, Denied, Unavailable
from kvstore.fleet.held import Where
from kvstore.fleet.node import FleetNode
from kvstore.fleet.registry import Node
from kvstore.fleet.routing import routes
from kvstore.transport import decoding
from kvstore.transport.attach import REQUEST_TIMEOUT_S
from kvstore.transport.rpc import Context, Handlers
from kvstore.transport.service import Service
from kvstore.types import ChunkKey, Outcome, Reason, WorkerId
from kvstore.v1 import fleet_pb2 as pb

FLEET_SERVICE = "kvstore.v1.Fleet"
KEYS_MAX = 65_536
ORDER_S = 120


class FleetService:
    def __init__(self, service: Service, node: FleetNode | None) -> None:
        """`node`: None where this daemon is no node of a fleet; then it is alone."""
        self._service = service
        self._loop = service.loop
        self._node = node

    def __repr__(self) -> str:
        return f"FleetService({self._node})"

    def handlers(self) -> Handlers:
        calls = {"Route": self._route, "ListNodes": self._list, "Drain": self._drain}
        return Handlers(
            {
                f"/{FLEET_SERVICE}/{name}": self._service.method(call, f"Fleet/{name}")
                for name, call in calls.items()
            }
        )

    # -------------------------------------------------------------------------------------------------------- routes

    async def _route(self, caller: WorkerId, raw: bytes, context: Context) -> bytes:
        message = wire.parse(pb.RouteRequest, raw)
        number = decoding.namespace_id(message.namespace_id)
        if bool(message.keys) == bool(message.session):
            raise BadRequest("asks for keys, or for a session", field="keys, session", value="both or none")
        if len(message.keys) > KEYS_MAX:
            raise BadRequest(f"has at most {KEYS_MAX}", field="keys", value=len(message.keys))
        state = self._loop.store.state
        namespace = state.administered_namespace(state.worker(caller), number)  # no bytes are handed over
        keys: tuple[ChunkKey, ...]
        if message.session:
            session: Any = await self._loop.ask(
                events.GetSession(Ticket(caller), number, message.session, elsewhere=True), REQUEST_TIMEOUT_S
            )
            keys = tuple(entry.key for entry in session.entries)
            if session.elsewhere is not None and session.elsewhere.keys[: len(keys)] == keys:
                keys = session.elsewhere.keys
        else:
            keys = decoding.chunk_keys("keys", message.keys)
        mine = np.zeros(len(keys), np.uint8)
        for index, key in enumerate(keys):
            _, outcome, reason = lookup(state, namespace, key)
            if outcome is Outcome.HIT:
                mine[index] = Where.DRAM
            elif reason is Reason.ON_SSD:
                mine[index] = Where.SSD
        here = self._here()
        node, registry = self._node, self._registry
        digest = node.digest(namespace.id) if node is not None else None
        known = registry is not None and digest is not None
        found = routes(
            here,
            mine,
            registry.others() if registry is not None else [],
            registry.holders(digest, keys) if known and registry is not None and digest is not None else [],
            namespace.payload_bytes,
            reachable=node.reads.is_open if node is not None else lambda _: False,
            cost_ms=node.source.cost_ms if node is not None else lambda _, size: (size / 1e6, size / 5e5),
        )
        reply = pb.RouteReply(keys=len(keys), registry=self._state())
        for route in found:
            load = route.node.load
            reply.nodes.add(
                name=route.node.name,
                address=route.node.address,
                here=route.here,
                draining=route.node.draining,
                reachable=route.reachable,
                prefix_chunks=route.prefix_chunks,
                prefix_dram_chunks=route.prefix_dram_chunks,
                prefix_bytes=route.prefix_chunks * namespace.payload_bytes,
                chunks=route.chunks,
                cost_ms=route.cost_ms,
                resident_share=load.get("resident_bytes", 0.0) / max(1.0, load.get("dram_bytes", 1.0)),
                leases=load.get("leases", 0.0),
            )
        return reply.SerializeToString()

    @property
    def _registry(self) -> Any:
        return self._node.registry if self._node is not None else None

    def _state(self) -> str:
        return str(self._registry.state) if self._registry is not None else "off"

    def _here(self) -> Node:
        return Node("", b"", "") if self._node is None else self._node.node

    # --------------------------------------------------------------------------------------------------------- nodes

    async def _list(self, caller: WorkerId, raw: bytes, context: Context) -> bytes:
        wire.parse(pb.ListNodesRequest, raw)
        self._check_admin(caller)
        node, registry = self._node, self._registry
        reply = pb.ListNodesReply(registry=self._state(), why=registry.why if registry is not None else "")
        if node is None:
            return reply.SerializeToString()
        here = node.node
        others = registry.known() if registry is not None else []
        for each, chunks in sorted([(here, node.chunks), *others], key=lambda row: row[0].name):
            reply.nodes.add(
                name=each.name,
                address=each.address,
                here=each is here,
                draining=each.draining,
                reachable=each is here or node.reads.is_open(each),
                boot_id=each.boot.hex(),
                known_chunks=chunks,
                bytes_per_s=0.0 if each is here else node.reads.speed(each),
                load=dict(each.load),
            )
        return reply.SerializeToString()

    async def _drain(self, caller: WorkerId, raw: bytes, context: Context) -> bytes:
        message = wire.parse(pb.DrainRequest, raw)
        self._check_admin(caller)
        node, registry = self._node, self._registry
        if node is None or registry is None:
            raise Unavailable(
                "this daemon is no node of a fleet", field="registry_url", value="empty", remedy="set it"
            )
        order = {"do": "undrain" if message.stop else "drain", "bytes_max": message.bytes_max}
        if message.node == node.name:
            node.obey(order)
            return pb.DrainReply(here=True).SerializeToString()
        if message.node not in {each.name for each in registry.others()}:
            raise BadRequest(
                "no such node is in the registry",
                field="node",
                value=message.node,
                remedy="kvctl fleet stats names them",
            )
        try:
            await asyncio.to_thread(registry.order, message.node, order, ORDER_S)
        except OSError as problem:
            raise Unavailable(f"the registry cannot be reached: {problem}", remedy="try again") from None
        return pb.DrainReply(here=False).SerializeToString()

    def _check_admin(self, caller: WorkerId) -> None:
        if not self._loop.store.state.worker(caller).admin:
            raise Denied(
                "is for operators: load and names of nodes are everybody's", field="Fleet", value="caller"
            )
