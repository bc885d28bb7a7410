"""Mooncake's store over TCP: its master, a storage process that lends memory, and a client that lends none.

Values go from and into buffers of the client that are registered with it. A put to a key that exists transfers nothing,
so keys are new each time.

    python mooncake.py ADDRESS ROOM_BYTES    is the storage process
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers import PEERS_PYTHON, ByKey, Item, Server, Shape, attempts, free_port, no_library, not_installed

PYTHON = PEERS_PYTHON
MASTER = str(Path(PYTHON).with_name("mooncake_master"))
GIVES = "made for RDMA between machines, here over TCP; eviction, leases; no checksum"


LIBRARY = "libibverbs.so.1"
"""Its wheel links it and does not bring it."""


def missing() -> str:
    return not_installed(MASTER, PYTHON) or no_library(LIBRARY)


def start(folder: Path, room_bytes: int) -> Server:
    port = free_port()
    address = {"master": f"127.0.0.1:{port}"}
    with open(folder / "mooncake.log", "wb") as log:
        command = [
            *(MASTER, "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"),
            f"--metrics_port={free_port()}",
        ]
        master = subprocess.Popen(command, stdout=log, stderr=log)
        lender = [PYTHON, "-P", __file__, json.dumps(address), str(room_bytes)]
        return Server(address, (master, subprocess.Popen(lender, stdout=log, stderr=log)))


def join(address: dict[str, Any], segment_bytes: int) -> Any:
    """A member of the cluster that lends `segment_bytes`."""
    os.environ["GLOG_minloglevel"] = "3"  # noqa: SIM112 - its name, read when the library is loaded
    from mooncake.store import MooncakeDistributedStore

    for _ in attempts("Mooncake's master"):
        store = MooncakeDistributedStore()
        name = f"127.0.0.1:{free_port()}"
        if not store.setup(name, "P2PHANDSHAKE", segment_bytes, 64 << 20, "tcp", "", address["master"]):
            return store
    raise AssertionError("attempts() ends by raising")


class Client(ByKey):
    def __init__(self, address: dict[str, Any], shape: Shape) -> None:
        super().__init__(shape)
        self._store = join(address, 0)
        for array in (self._source, self.outs):
            assert not self._store.register_buffer(array.ctypes.data, array.nbytes)
        for _ in attempts("Mooncake's storage process"):
            if not self._store.put(f"{shape.client}:ready", b"ready"):
                break

    def put(self, plan: list[Item]) -> None:
        results = self._store.batch_put_from(
            [item.key for item in plan],
            [item.value.ctypes.data for item in plan],
            [item.value.nbytes for item in plan],
        )
        assert not any(results), results

    def get(self, plan: list[Item]) -> None:
        results = self._store.batch_get_into(
            [item.key for item in plan],
            [item.out.ctypes.data for item in plan],
            [item.out.nbytes for item in plan],
        )
        assert all(count == self.shape.value_bytes for count in results), results

    def forget(self, plan: list[Item]) -> None:
        for item in plan:
            self._store.remove(item.key)

    def close(self) -> None:
        self._store.close()


def main() -> None:
    store = join(json.loads(sys.argv[1]), int(sys.argv[2]))
    assert store
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
