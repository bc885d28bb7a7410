"""A worker process that stops itself (SIGSTOP) at one chosen place, so that a test can kill it exactly there.

    --stop-at load:N   before the N-th copy of a layer's KV out of the store
    --stop-at copy:N   in the middle of it, after N pieces in all: some of its bytes are copied, the generations not yet
                       compared again
    --stop-at save:N   before the N-th chunk is copied to where it is saved
    --stop-at encode:N before the N-th chunk of a module is copied to where it is saved
    --fork             with a child alive that has inherited everything; its pid goes to standard error

All else is handed to kvstore.gpu_worker.worker.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import kvstore.client.lease
from kvstore.gpu_worker import worker
from kvstore.gpu_worker.saver import Saver
from kvstore.gpu_worker.serve import process


def stop_at_call(number: int, function: Callable[..., Any], *, before: bool = True) -> Callable[..., Any]:
    calls = 0

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        stop = calls == number
        if stop and before:
            stop_here()
        result = function(*args, **kwargs)
        if stop and not before:
            stop_here()
        return result

    return stopping


def stop_here() -> None:
    # To this thread: of a signal to the process any thread may take notice, while this one runs on a little.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def main(arguments: list[str]) -> None:
    if "--fork" in arguments:
        arguments.remove("--fork")
        fork_once_connected()
    if "--stop-at" in arguments:
        at = arguments.index("--stop-at")
        place, number = arguments[at + 1].split(":")
        del arguments[at : at + 2]
        lease = kvstore.client.lease
        if place == "load":
            lease.ReadLease.copy_many = stop_at_call(int(number), lease.ReadLease.copy_many)
        elif place == "copy":
            one = stop_at_call(int(number), lease.copy_pairs, before=False)
            lease.copy_pairs = lambda pairs: [one([pair]) for pair in pairs]
        elif place == "save":
            Saver._shard = stop_at_call(int(number), Saver._shard)
        elif place == "encode":
            Saver._fill_part = stop_at_call(int(number), Saver._fill_part)
        else:
            raise SystemExit(f"no such place: {place}")
    worker.main(arguments)


def fork_once_connected() -> None:
    """The child has the descriptor socket and the stream's socket open too: neither may look as if we lived."""
    connect = process.connect

    def connecting(*args: Any, **kwargs: Any) -> Any:
        client = connect(*args, **kwargs)
        if (child := os.fork()) == 0:
            time.sleep(300)  # the test ends it, long before
            os._exit(0)
        print(f"child {child}", file=sys.stderr, flush=True)
        return client

    process.connect = connecting


if __name__ == "__main__":
    main(sys.argv[1:])
