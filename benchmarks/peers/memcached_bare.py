"""memcached's protocol spoken by a client of our own, which sends from and receives into the caller's arrays: what the
server can do when no library makes an object of each value. All commands of a batch are sent before the first answer is
read; a get names all keys in one command."""

from __future__ import annotations

import socket
from typing import Any

from peers import ByKey, Item, Shape, connected, line, receive
from peers.memcached import missing, start

__all__ = ["GIVES", "Client", "missing", "start"]
GIVES = "a server of the same kind"


class Client(ByKey):
    def __init__(self, address: dict[str, Any], shape: Shape) -> None:
        super().__init__(shape)
        self._stream = connected(address["path"])

    def key(self, number: int) -> bytes:
        return super().key(number).encode()

    def put(self, plan: list[Item]) -> None:
        for key, value, _ in plan:
            self._stream.sendall(b"set %s 0 0 %d\r\n" % (key, value.nbytes), socket.MSG_MORE)
            self._stream.sendall(value, socket.MSG_MORE)
            self._stream.sendall(b"\r\n")
        for _ in plan:
            answer = line(self._stream)
            assert answer == b"STORED", answer

    def get(self, plan: list[Item]) -> None:
        self._stream.sendall(b"get %s\r\n" % b" ".join(item.key for item in plan))
        for key, _, out in plan:
            answer = line(self._stream)
            assert answer == b"VALUE %s 0 %d" % (key, out.nbytes), answer
            receive(self._stream, out)
            receive(self._stream, bytearray(2))
        assert line(self._stream) == b"END"

    def forget(self, plan: list[Item]) -> None:
        self._stream.sendall(b"".join(b"delete %s\r\n" % item.key for item in plan))
        for _ in plan:
            line(self._stream)

    def close(self) -> None:
        self._stream.close()
