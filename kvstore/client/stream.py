"""What carries requests and replies between an attachment and the daemon: gRPC's Attach stream, or a fast lane."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from kvstore import wire
from kvstore.client.call import Call, gone
from kvstore.errors import StoreError
from kvstore.v1 import store_pb2, store_pb2_grpc

Receive = Callable[[store_pb2.AttachReply], None]
"""What every reply is handed to, one after the other."""


class Carrier(Protocol):
    """Thread-safe. `run` is called once, by a thread that then serves this carrier until its end."""

    def run(self) -> StoreError:
        """Until the end; returns why it ended."""

    def send(self, request: store_pb2.AttachRequest) -> None:
        """Never blocks. What is sent after the end is lost."""

    @property
    def unsent(self) -> int:
        """Requests that are not on their way yet."""

    def wait(self, call: Call) -> None:
        """Until the call is done, its deadline, or (perhaps) the end of the carrier."""

    def listen(self) -> None:
        """An answer is wanted at once for which no thread waits."""

    def cancel(self) -> None:
        """End it, from any thread. Idempotent."""


class GrpcStream:
    """A stream whose first message is our hello."""

    def __init__(self, channel: grpc.Channel, hello: store_pb2.AttachHello, receive: Receive) -> None:
        self._receive = receive
        self._outgoing: queue.SimpleQueue[store_pb2.AttachRequest | None] = queue.SimpleQueue()
        self._outgoing.put(store_pb2.AttachRequest(hello=hello))
        requests: Iterator[store_pb2.AttachRequest] = iter(self._outgoing.get, None)
        self._stream: Any = store_pb2_grpc.StoreStub(channel).Attach(requests)

    def __repr__(self) -> str:
        return "GrpcStream()"

    def run(self) -> StoreError:
        try:
            for reply in self._stream:
                self._receive(reply)
        except grpc.RpcError as failure:
            return status_error(failure)
        return gone("the daemon ended the stream")

    def send(self, request: store_pb2.AttachRequest) -> None:
        self._outgoing.put(request)

    @property
    def unsent(self) -> int:
        return self._outgoing.qsize()

    def wait(self, call: Call) -> None:
        call.pause(call.deadline - time.monotonic())

    def listen(self) -> None:
        """gRPC always does."""

    def cancel(self) -> None:
        self._outgoing.put(None)  # ends gRPC's thread that waits for requests
        self._stream.cancel()


def status_error(failure: Any) -> StoreError:
    """The StoreError of a failed call (its RpcError has these three methods, though the class does not say so)."""
    return wire.error_from_status(
        failure.code().value[0], failure.details() or "", failure.trailing_metadata() or ()
    )
