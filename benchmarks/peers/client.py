"""One client of one store, in a process of its own, driven over a pipe: a line of JSON in, a line of JSON out.

The clock runs here, around nothing but the call itself, so the pipe costs no store anything.

    python client.py MODULE ADDRESS SHAPE
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers import Shape

BATCH_OF_FILL = 16
HOT_BATCHES_MAX = 1024
"""More would take long to put one by one."""


class Driver:
    def __init__(self, client: Any, shape: Shape) -> None:
        self.client = client
        self.shape = shape
        self.step = min(BATCH_OF_FILL, shape.batch_max, shape.hot)
        self._fresh = itertools.count(1 << 20)
        self._next = 0
        self._put: list[Any] = []
        self._filled: set[int] = set()

    def touch(self) -> dict[str, Any]:
        """Fill a store that keeps what it has until it is full up to the share FILLS_UP of its room: then it and the
        client have touched their memory, as those that run for a while have."""
        batch_bytes = self.step * self.shape.value_bytes
        for _ in range(int(self.shape.room_bytes * getattr(self.client, "FILLS_UP", 0)) // batch_bytes):
            self.client.put(self._plan("put", self.step))
        if hasattr(self.client, "clear"):
            self.client.clear()
        return {}

    def fill(self, batch: int) -> dict[str, Any]:
        """Put what gets will read, and read it once; once for all, or for each size of a batch if the store knows a
        value by its batch (BY_BATCH)."""
        step = batch if getattr(self.client, "BY_BATCH", False) else self.step
        if step not in self._filled:
            self._filled.add(step)
            plans = [self.client.plan(range(first, first + step)) for first in range(0, self.hot(step), step)]
            for plan in plans:
                self.client.put(plan)
            if hasattr(self.client, "wait"):
                self.client.wait(plans[-1])
            for plan in plans:
                self.client.get(plan)
                self.client.check(plan)
        self._next = 0
        return {}

    def refresh(self) -> dict[str, Any]:
        """Get all that gets read, for a store that evicts what was not used for longest: slow turns use but some."""
        for first in range(0, self.hot(self.step), self.step):
            self.client.get(self.client.plan(range(first, first + self.step)))
        return {}

    def hot(self, batch: int) -> int:
        """How many values gets cycle through, in whole batches."""
        return min(self.shape.hot // batch, HOT_BATCHES_MAX) * batch

    def turn(
        self, action: str, batch: int, calls: int = 0, most: int = 0, begin: float = 0.0, seconds: float = 0.0
    ) -> dict[str, Any]:
        """`calls` calls one after the other, after one more that wakes up what has slept meanwhile; or without a number
        as many as begin within `seconds` after the instant `begin`, or the first `most` of them."""
        plans = (self._plan(action, batch) for _ in itertools.count())
        ready = [next(plans) for _ in range(calls + 1 if calls else most)]
        call = getattr(self.client, action)
        took, cpu = [], 0.0
        if calls:
            call(ready[0])
        time.sleep(max(0.0, begin - time.monotonic()))
        started = time.monotonic()
        in_time = itertools.takewhile(lambda _: time.monotonic() < started + seconds, plans)
        chosen = ready[1 if calls else 0 :] or in_time
        done = map(call, chosen)
        while True:
            began, used = time.perf_counter(), time.process_time()
            if next(done, self) is self:
                break
            took.append(time.perf_counter() - began)
            cpu += time.process_time() - used
        elapsed = time.monotonic() - started
        if action != "get":
            self._put += ready
        return {"took": took, "cpu_s": cpu, "elapsed_s": elapsed}

    def tidy(self) -> dict[str, Any]:
        """Forget what was put in turns."""
        while self._put:
            self.client.forget(self._put.pop())
        return {}

    def check(self, batch: int) -> dict[str, Any]:
        plan = self._plan("get", batch)
        self.client.get(plan)
        self.client.check(plan)
        return {}

    def _plan(self, action: str, batch: int) -> Any:
        if action != "get":
            return self.client.plan([next(self._fresh) for _ in range(batch)])
        if self._next + batch > self.hot(batch):
            self._next = 0
        first, self._next = self._next, self._next + batch
        return self.client.plan(range(first, first + batch))


def main() -> int:
    module, address, shape = sys.argv[1], json.loads(sys.argv[2]), Shape(**json.loads(sys.argv[3]))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.closing(importlib.import_module(f"peers.{module}").Client(address, shape)) as client:
        driver = Driver(client, shape)
        print("{}", file=answers)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = getattr(driver, request.pop("do"))(**request)
            except Exception as error:
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
