"""Ours from another machine, over loopback TCP: the calls Get and Put, one chunk each, in frames of 2 MiB.

Frames are written and read by hand, with the payload as their last field: protobuf would copy it twice more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from peers import START_S, ByKey, Item, Shape, attempts
from peers.attnstore import chunk_key, missing, spec_of, start

__all__ = ["GIVES", "Client", "missing", "start"]
GIVES = "ours over TCP, for callers without shared memory"
FRAME_BYTES = 2 << 20
TIMEOUT_S = 30.0
PAYLOAD_TAG = b"\x7a"
"""Field 15, length-delimited."""


class Client(ByKey):
    def __init__(self, address: dict[str, Any], shape: Shape) -> None:
        import grpc

        from kvstore import memory, wire
        from kvstore.v1 import bytes_pb2, stats_pb2, store_pb2

        memory.keep_freed_memory()
        super().__init__(shape)
        self._channel = grpc.insecure_channel(
            address["tcp"], options=[("grpc.max_receive_message_length", 4 << 20)]
        )
        request = store_pb2.OpenRequest(namespace=wire.spec_to_proto(spec_of(shape)))
        call = self._channel.unary_unary("/kvstore.v1.Store/Open")
        reply = call(request.SerializeToString(), timeout=START_S, wait_for_ready=True)
        self._namespace = store_pb2.OpenReply.FromString(reply).namespace_id
        self._get = self._channel.unary_stream("/kvstore.v1.Bytes/Get")
        self._put = self._channel.stream_unary("/kvstore.v1.Bytes/Put")
        self._messages = bytes_pb2
        stats = self._channel.unary_unary("/kvstore.v1.Stats/GetStats")
        for _ in attempts("the whole arena"):
            arena = stats_pb2.StatsReply.FromString(stats(b"", timeout=START_S)).arena
            if arena.ready_bytes == arena.bytes:
                break

    def key(self, number: int) -> Any:
        return chunk_key(super().key(number))

    def put(self, plan: list[Item]) -> None:
        for key, value, _ in plan:
            reply = self._messages.PutReply.FromString(self._put(self._frames(key, value), timeout=TIMEOUT_S))
            assert (reply.grant, reply.result) == (0, 0), reply

    def _frames(self, key: bytes, value: Any) -> Iterator[bytes]:
        yield self._messages.PutFrame(namespace_id=self._namespace, key=key).SerializeToString()
        for at in range(0, value.nbytes, FRAME_BYTES):
            piece = value[at : at + FRAME_BYTES]
            yield b"".join((PAYLOAD_TAG, varint(piece.nbytes), piece.data))

    def get(self, plan: list[Item]) -> None:
        for key, _, out in plan:
            request = self._messages.GetRequest(
                namespace_id=self._namespace, key=key, frame_bytes=FRAME_BYTES
            )
            at = 0
            for frame in self._get(request.SerializeToString(), timeout=TIMEOUT_S):
                if not frame.startswith(PAYLOAD_TAG):
                    first = self._messages.GetFrame.FromString(frame)
                    assert not first.outcome, first
                    payload = np.frombuffer(first.payload, np.uint8)
                else:
                    length = min(FRAME_BYTES, out.nbytes - at)
                    payload = np.frombuffer(frame, np.uint8, length, 1 + len(varint(length)))
                out[at : at + payload.nbytes] = payload
                at += payload.nbytes
            assert at == out.nbytes, (at, out.nbytes)

    def close(self) -> None:
        self._channel.close()


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))
