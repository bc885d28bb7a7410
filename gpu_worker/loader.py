"""The Loader: copies a session's KV from the store into tensors, layer by layer, ahead of the layer that computes. Keys
that are to lie at other positions than they were computed at are rotated on the way, from the stored bytes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvstore.errors import Unsupported
from kvstore.gpu_worker.layout import Bits, Geometry
from kvstore.gpu_worker.positions import Positions
from kvstore.kernels.rotate import Rotation, rotate

if TYPE_CHECKING:
    from kvstore.client import ReadLease

SHARD = 0
log = logging.getLogger(__name__)


class LoadFailed(Exception):
    """The KV did not arrive whole and in time: nothing of it is used."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk to load: its number in the lease, and the tokens [first_token, first_token + token_count) it fills.
    `delta`: how far its keys have moved from the positions that they were computed at. Only modules of Prompt Cache
    move: all else is to be what a model computes from the tokens, and moved KV has seen other tokens before it."""

    index: int
    first_token: int
    token_count: int
    delta: int = 0


Target = Callable[[int, Piece], Bits | Sequence[Bits]]
"""Where a piece goes in a layer: [2, H_kv, token_count, D], or several of these, whose tokens follow one another."""


class Load:
    """One turn's load in flight. `wait` is called by the model's thread, all else by the loader's."""

    def __init__(
        self,
        lease: ReadLease,
        pieces: Sequence[Piece],
        target: Target,
        geometry: Geometry,
        deadline_s: float,
        positions: Positions | None = None,
    ) -> None:
        tokens = sum(piece.token_count for piece in pieces)
        self.bytes = tokens * geometry.token_bytes * geometry.layers
        self.ended: Future[None]
        """Done once nothing more is written, whatever came of it."""
        self._lease = lease
        self._pieces = pieces
        self._target = target
        self._geometry = geometry
        self._positions = positions
        self._moves: dict[int, tuple[Rotation, ...]] = {}
        self._deadline = time.monotonic() + deadline_s
        self._changed = threading.Condition()
        self._loaded = 0
        self._failure = ""

    def wait(self, layer: int) -> None:
        """Returns once `layer` is in. Raises LoadFailed if it will not come or did not come before the deadline; from
        then on every layer fails: a load is used whole or not at all."""
        with self._changed:
            left = self._deadline - time.monotonic()
            self._changed.wait_for(lambda: self._failure or self._loaded > layer, timeout=max(left, 0.0))
            if self._loaded <= layer and not self._failure:
                self._failure = f"layer {layer} was not in at the deadline"
            if self._failure:
                raise LoadFailed(self._failure)

    def cancel(self, why: str) -> None:
        """Nobody wants the rest. A copy that runs ends first; the lease is released after it."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()

    def run(self) -> None:
        """Copies all layers in order, then releases the lease, whatever happened."""
        try:
            for layer in range(self._geometry.layers):
                if self._failure:
                    return
                whole = self._copy(layer)
                with self._changed:
                    if whole:
                        self._loaded = layer + 1
                    else:
                        self._failure = self._failure or f"the lease was void at layer {layer}"
                    self._changed.notify_all()
        except Exception as error:
            # Our bug, or the client's: said loudly here, while the model must not wait for what will not come.
            log.exception("loading failed")
            self.cancel(f"the loader failed: {error!r}")
        finally:
            self._lease.release()

    def _copy(self, layer: int) -> bool:
        """In every call the lease compares the slots' generations before the first byte and after the last: what is
        reported as loaded here was the committed bytes, whatever becomes of the slots later."""
        offset = self._geometry.offset(layer)
        copies: list[tuple[int, int, int, Bits]] = []
        scattered: list[tuple[Piece, Bits, Sequence[Bits]]] = []
        """Piece, its bytes as they were stored, and where they go."""
        for piece in self._pieces:
            target = self._target(layer, piece)
            if isinstance(target, np.ndarray) and not piece.delta:
                copies.append((piece.index, SHARD, offset, target))
                continue
            targets = [target] if isinstance(target, np.ndarray) else target
            _, heads, _, size = targets[0].shape
            stored: Bits = np.empty((2, heads, piece.token_count, size), targets[0].dtype)
            copies.append((piece.index, SHARD, offset, stored))
            scattered.append((piece, stored, targets))
        if not copies or not self._lease.copy_many(copies):
            return not copies
        for piece, stored, targets in scattered:
            begin = 0
            for target in targets:
                here = slice(begin, begin + target.shape[2])
                begin = here.stop
                if piece.delta:
                    self._rotate(layer, piece.delta, stored[0, :, here], target[0])
                    target[1] = stored[1, :, here]
                else:
                    target[...] = stored[:, :, here]
        return True

    def _rotate(self, layer: int, delta: int, stored: Bits, target: Bits) -> None:
        assert self._positions is not None
        if delta not in self._moves:
            self._moves[delta] = self._positions.rotations(delta)
        keys, out = (torch.from_numpy(each).view(self._geometry.dtype) for each in (stored, target))
        rotate(keys, self._moves[delta][layer], out=out)


class Loader:
    """One thread that runs loads in the order in which they were started."""

    def __init__(self, geometry: Geometry, positions: Positions | None = None) -> None:
        """`positions`: of a model whose keys can be moved."""
        self._geometry = geometry
        self._positions = positions
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-loader")

    def start(self, lease: ReadLease, pieces: Sequence[Piece], target: Target, *, deadline_s: float) -> Load:
        """Takes over `lease`. What `target` names is not to be read before `Load.wait` says so. Raises Unsupported, and
        takes over nothing, if keys are to be moved and there are no `positions`."""
        if self._positions is None and (moved := [piece.delta for piece in pieces if piece.delta]):
            raise Unsupported(
                "this loader moves no keys",
                field="pieces.delta",
                value=moved[0],
                remedy="make it with positions",
            )
        load = Load(lease, pieces, target, self._geometry, deadline_s, self._positions)
        load.ended = self._thread.submit(load.run)
        return load

    def close(self) -> None:
        self._thread.shutdown(wait=True)
