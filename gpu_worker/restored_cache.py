"""A Hugging Face `Cache` whose history arrives while the model already computes.

Layer i waits, inside its own `update()`, for its own KV only; everything the model asks before that (lengths, mask
sizes) is answered from the number of tokens that are on their way. Tensors have room for the tokens to come: nothing is
concatenated per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvstore.gpu_worker.layout import Bits, Geometry, bits

GROWTH = 1.5


class LoadFailed(Exception):
    """The history did not arrive whole and in time: the cache is void, the turn starts again from its tokens."""


class GrowingLayer(DynamicLayer):
    """K and V of one layer, each [B, H_kv, n, D]. Append-only: the elements of a token are written once.

    That is what lets a saver read them without a lock while the model goes on: `update` writes behind the last token
    only, growing moves to fresh memory and leaves the old as it was, and whatever else replaces the tensors (crop,
    reorder, ...) drops the spare room, so that the next `update` moves too.
    """

    def __init__(self, *, capacity: int = 0) -> None:
        """`capacity`: tokens to make room for at once; more are welcome."""
        self._capacity = capacity
        self._room: torch.Tensor | None = None
        """[2, B, H_kv, capacity, D]; `_keys` and `_values` are its first n tokens, or it is None."""
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._arriving = 0
        self._wait: Callable[[], None] | None = None
        super().__init__()  # type: ignore[no-untyped-call]

    def expect(self, room: torch.Tensor, length: int, wait: Callable[[], None]) -> None:
        """The first `length` tokens of `room` [2, B, H_kv, capacity, D] are there once `wait` returns; it raises
        LoadFailed otherwise, again and again: nobody gets to see tensors that were not filled."""
        self._room, self._arriving, self._wait = room, length, wait
        self.dtype, self.device = room.dtype, room.device
        self.is_initialized = True

    @property
    def keys(self) -> torch.Tensor | None:
        self._resolve()
        return self._keys

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._keys, self._room = tensor, None

    @property
    def values(self) -> torch.Tensor | None:
        self._resolve()
        return self._values

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._values, self._room = tensor, None

    def get_seq_length(self) -> int:
        if self._wait is not None:
            return self._arriving
        return 0 if self._keys is None else int(self._keys.shape[-2])

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._grow(key_states, 0)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends q tokens, [B, H_kv, q, D] each; returns K and V of all tokens."""
        self._resolve()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._arriving and self._room is not None and key_states.dtype != self._room.dtype:
            raise LoadFailed(f"the model computes {key_states.dtype}, the history is {self._room.dtype}")
        if self._room is None or end > self._room.shape[-2]:
            self._grow(key_states, end)
        assert self._room is not None
        self._room[0, :, :, start:end] = key_states
        self._room[1, :, :, start:end] = value_states
        self._keys, self._values = self._room[0, :, :, :end], self._room[1, :, :, :end]
        return self._keys, self._values

    def reset(self) -> None:
        self._wait = None
        super().reset()

    def _resolve(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None
            assert self._room is not None
            self._keys, self._values = (
                self._room[0, :, :, : self._arriving],
                self._room[1, :, :, : self._arriving],
            )

    def _grow(self, like: torch.Tensor, tokens: int) -> None:
        batch, heads, _, head_dim = like.shape
        held = self.get_seq_length()
        room = like.new_empty(2, batch, heads, max(tokens, self._capacity, int(held * GROWTH)), head_dim)
        if self._keys is not None and self._values is not None and held:
            room[0, :, :, :held], room[1, :, :, :held] = self._keys, self._values
        self._room = room
        self._keys, self._values = room[0, :, :, :held], room[1, :, :, :held]


class RestoredCache(Cache):
    """The cache of one sequence: `restored` tokens that are on their way, room for `capacity` in all."""

    def __init__(self, geometry: Geometry, *, capacity: int, restored: int = 0) -> None:
        self.geometry = geometry
        self.restored = restored
        self._capacity = max(capacity, restored)
        self._growing = [GrowingLayer(capacity=self._capacity) for _ in range(geometry.layers)]
        self._rooms: list[torch.Tensor] = []
        super().__init__(layers=list(self._growing))

    def targets(self) -> list[Bits]:
        """Memory for the history, one [2, H_kv, capacity, D] a layer, to be filled by whoever then says `expect`."""
        shape = (2, 1, self.geometry.heads, self._capacity, self.geometry.head_dim)
        self._rooms = [torch.empty(shape, dtype=self.geometry.dtype) for _ in self.layers]
        return [bits(room)[:, 0] for room in self._rooms]

    def expect(self, wait: Callable[[int], None]) -> None:
        """`wait(layer)` returns once that layer's history is in its target, or raises LoadFailed."""
        for number, (layer, room) in enumerate(zip(self._growing, self._rooms, strict=True)):
            layer.expect(room, self.restored, partial(wait, number))

    def snapshot(self, first_token: int = 0) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of every layer as they are now, from that token on, [1, H_kv, n, D]: later steps append behind them
        and never write into them (see GrowingLayer)."""
        snapshot = []
        for layer in self._growing:
            assert layer.keys is not None and layer.values is not None, (
                "a snapshot of a cache that holds nothing"
            )
            snapshot.append((layer.keys[:, :, first_token:], layer.values[:, :, first_token:]))
        return snapshot
