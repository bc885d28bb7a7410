"""Reading batch after batch: the next ones are asked for while the caller copies this one."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from kvstore.client.call import Call, Operation, Suspension, drive
from kvstore.client.lease import ReadLease
from kvstore.types import ChunkKey, Reason

Read = Callable[[Sequence[ChunkKey]], Operation[ReadLease]]


class Reads:
    """What `Namespace.reads` returns: an iterator over one lease for each batch, in order. Each is the caller's to
    release. A context manager; `close` gives back what was asked for and not handed out. For one thread."""

    def __init__(self, batches: Iterable[Sequence[ChunkKey]], read: Read, ahead: int) -> None:
        self._batches = iter(batches)
        self._read = read
        self._ahead = ahead
        self._asked: deque[_Asked] = deque()
        self._over = False

    def __repr__(self) -> str:
        return f"Reads({len(self._asked)} asked for, {'no' if self._over else 'perhaps'} more)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # May run at any point of any thread, so it takes no lock and leaves the work to the housekeeping.
        for asked in getattr(self, "_asked", ()):
            if isinstance(asked.suspension, Call):
                asked.suspension.attachment.later(asked.give_up)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ReadLease:
        while not self._over and len(self._asked) <= self._ahead:
            self._ask()
        if not self._asked:
            raise StopIteration
        asked = self._asked[0]
        try:
            lease = asked.finish()
        finally:
            self._asked.popleft()
        # As if it had been asked for only now: those before it may have been released since.
        if (lease.lease_id and not lease.alive) or Reason.QUOTA in lease.reasons:
            lease.release()
            lease = drive(self._read(asked.keys))
        return lease

    def _ask(self) -> None:
        """For the next batch. What is wrong with it is raised in its turn."""
        try:
            keys = next(self._batches)
        except StopIteration:
            self._over = True
            return
        except Exception as problem:
            self._over = True
            self._asked.append(_Asked((), self._read, problem))
            return
        self._asked.append(_Asked(keys, self._read))

    def close(self) -> None:
        """Nothing more is asked for, and what was is given back. Does not wait; idempotent."""
        self._over = True
        while self._asked:
            self._asked[0].give_up()
            self._asked.popleft()


class _Asked:
    """A read whose request is under way."""

    def __init__(self, keys: Sequence[ChunkKey], read: Read, problem: Exception | None = None) -> None:
        """`problem`: there are no keys, because of it."""
        self.keys = keys
        self.suspension: Suspension | None = None
        """What it waits for."""
        self._read = read
        self._operation = read(keys)
        self._lease: ReadLease | None = None
        self._problem = problem
        if problem is not None:
            return
        try:
            self.suspension = next(self._operation)
        except StopIteration as end:
            self._lease = end.value
        except Exception as error:
            self._problem = error

    def finish(self) -> ReadLease:
        """Once. Raises what the read raises."""
        if self._problem is not None:
            raise self._problem
        if self._lease is not None:
            return self._lease
        assert self.suspension is not None, self.keys
        if self._is_of_parent:
            return drive(self._read(self.keys))
        suspension, self.suspension = self.suspension, None
        return drive(self._operation, suspension)

    def give_up(self) -> None:
        """Its answer is given back when it comes, or now."""
        if self._lease is not None:
            self._lease.release()
        if isinstance(self.suspension, Call) and not self._is_of_parent:
            self.suspension.attachment.abandon(self.suspension)
        self.suspension = None
        self._operation.close()

    @property
    def _is_of_parent(self) -> bool:
        """We are a forked child: nobody will answer, and its locks may be held for ever."""
        return isinstance(self.suspension, Call) and self.suspension.attachment.pid != os.getpid()
