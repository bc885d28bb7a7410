"""The byte geometry of a namespace, looked up per copy: sizes of shards, places of layers."""

from __future__ import annotations

from kvstore.arguments import whole
from kvstore.errors import BadRequest
from kvstore.layout import NamespaceSpec


class Geometry:
    def __init__(self, spec: NamespaceSpec) -> None:
        self.shard_bytes = spec.shard_bytes
        self._layers = tuple(
            {piece.layer: (piece.offset, piece.length) for piece in group.layers}
            for group in spec.groups
            for _ in range(group.shard_count)
        )

    def span(self, shard: int, layer: int | None) -> tuple[int, int]:
        """(offset, length) in bytes of the shard, or of one layer in it. Raises BadRequest."""
        if layer is None:
            return 0, self.shard_bytes[shard]
        try:
            return self._layers[shard][layer if type(layer) is int else whole("layer", layer)]
        except KeyError:
            known = sorted(self._layers[shard])
            raise BadRequest(
                f"shard {shard} has no such layer",
                field="layer",
                value=layer,
                remedy=f"it has {known[0]} to {known[-1]}"
                if known
                else "load it whole: its layout is opaque",
            ) from None

    def wanted(self, shards: tuple[int, ...]) -> tuple[int, ...]:
        """Shard numbers of a request; none means all. Raises BadRequest."""
        for shard in shards:
            if not 0 <= shard < len(self.shard_bytes):
                raise BadRequest(
                    f"the namespace has shards 0 to {len(self.shard_bytes) - 1}", field="shards", value=shard
                )
        if len(set(shards)) != len(shards):
            raise BadRequest("names a shard twice", field="shards", value=shards)
        return shards or tuple(range(len(self.shard_bytes)))
