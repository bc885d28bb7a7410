"""Whether a device may be used with a store: its segments are registered, and it has passed the self-check, lately or
now. Of an engine's worker as of a connector's rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvstore.errors import Unsupported
from kvstore.gpu_worker.device import Device
from kvstore.gpu_worker.segments import Path, Segments
from kvstore.gpu_worker.self_check import GEOMETRIES, Refused, check
from kvstore.gpu_worker.verdicts import Verdicts, default_file, subject

if TYPE_CHECKING:
    from kvstore.client import Client, Namespace
    from kvstore.gpu_worker.layout import Geometry


REGISTER_TIMEOUT_S = 120.0
"""Of the segments that there are at the start: some tenths of a second for a GiB."""


class Proven:
    def __init__(
        self,
        device: Device,
        where: torch.device,
        *,
        geometries: tuple[Geometry, ...] = GEOMETRIES,
        verdicts: Verdicts | None = None,
    ) -> None:
        """`where`: its memory. `geometries`: of the KV that is moved; by default several, for layouts that are not
        ours."""
        self.segments = Segments(device)
        self._device = device
        self._where = where
        self._geometries = geometries
        self._verdicts = verdicts or Verdicts(default_file())

    def attach(self, client: Client) -> None:
        """Before anything is read through `client`. Raises Unsupported for a device that does not pass, and whatever
        the daemon has against us."""
        self.segments.attach(client)
        if self.segments.failure:
            raise cannot_be_used(self._device, self.segments.failure)
        path = self.segments.path
        if path is Path.DIRECT:
            return
        for geometry in self._geometries:
            about = subject(self._device, geometry, path.value)
            if self._verdicts.passed(about):
                continue
            try:
                check(self._device, self._where, geometry, client.open, path=path)
            except Refused as refused:
                self.segments.fail(f"the device did not pass its self-check: {refused}")
                raise cannot_be_used(self._device, self.segments.failure) from refused
            self._verdicts.note(about)

    def register_all(self, namespace: Namespace, *, shard: int) -> None:
        """What there is now of this rank's shards. Other segments follow when they are first looked up."""
        if self.segments.path is Path.REGISTERED:
            namespace.map_segments(shards=(shard,), timeout_s=REGISTER_TIMEOUT_S)

    def distrust(self, found: str) -> None:
        """What the device was given is not what it has."""
        self._verdicts.take_back(self._device)
        self.segments.fail(f"what {self._device.name} was given is not what it has: {found}")


def cannot_be_used(device: Device, why: str) -> Unsupported:
    return Unsupported(
        f"KV cannot be moved from and to it: {why}",
        field="device",
        value=device.name,
        remedy="see `kvctl doctor gpu`, and the limit of locked memory; or have the model on a CPU",
    )
