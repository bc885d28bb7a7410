"""How a device gets at the arena, and which of its segments are registered with it.

    DIRECT      the device's memory is the host's: the client copies, and nothing is registered
    REGISTERED  each segment is registered when it is mapped, and unregistered before it is unmapped; the device copies
                out of it
    BOUNCE      the client copies into a few buffers, and the device out of these (`bounce.py`): under protection
                `sealed` this process can only read the arena, and most cards register no memory that is read-only

A registration that fails ends the path: copies from other memory would hold up whoever asks for them, unseen.
Registering and unregistering take locks of the driver and wait for what is in flight, so it is done where segments are
mapped: when the engine begins, or on a thread that looks chunks up; and unregistering on a thread of its own.
"""

from __future__ import annotations

import enum
import errno
import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvstore.errors import Unsupported
from kvstore.gpu_worker.device import CannotRegister, Device, DeviceFailed
from kvstore.types import Protection

if TYPE_CHECKING:
    from kvstore.client import Client

log = logging.getLogger(__name__)


class Path(enum.Enum):
    DIRECT = "direct"
    REGISTERED = "registered"
    BOUNCE = "bounce"


class Segments:
    """Of one device; what a client tells of the segments that it maps (`client.mappings.Registrar`)."""

    def __init__(self, device: Device) -> None:
        self.path = Path.DIRECT if device.in_host_memory else Path.REGISTERED
        self.failure = ""
        """Why the path is not to be used any more; "" while it is."""
        self.registered_bytes = 0
        self._device = device
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}
        """Address -> bytes of what is registered."""
        self._unmapping: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Segments({self.path.value}, {len(self._sizes)} registered, {self.registered_bytes} bytes)"

    @property
    def registered(self) -> list[tuple[int, int]]:
        """(address, bytes) of what is registered."""
        with self._lock:
            return list(self._sizes.items())

    def attach(self, client: Client) -> None:
        """From now on `client` maps nothing that the device does not know of. Raises Unsupported where what is mapped
        already cannot be registered."""
        if self._device.in_host_memory:
            return
        sealed = client.protection is Protection.SEALED
        self.path = Path.BOUNCE if sealed and not self._device.registers_read_only else Path.REGISTERED
        if self._thread is None:
            self._thread = threading.Thread(target=self._unmap, name="kv-unregister", daemon=True)
            self._thread.start()
        try:
            client.register_with(self)
        except OSError as error:
            raise Unsupported(
                "the device cannot be given the arena",
                field="device",
                value=self._device.name,
                remedy=f"raise the limit of locked memory, or use the store from a CPU: {error.strerror}",
            ) from error

    def fail(self, why: str) -> None:
        """The path is not to be used any more."""
        if not self.failure:
            self.failure = why
            log.error("%s; nothing is loaded or saved any more", why)

    def mapped(self, number: int, data: npt.NDArray[np.uint8]) -> None:
        """Raises OSError."""
        if self.failure:  # what is registered already stays usable for copies that run, and for no others
            raise OSError(errno.ENOMEM, self.failure)
        if not (data.flags.writeable or self._device.registers_read_only):
            self.path = Path.BOUNCE  # the daemon was started anew, with another protection
            return
        address = data.ctypes.data
        try:
            self._device.register(data)
        except (CannotRegister, DeviceFailed) as error:
            self.fail(f"segment {number} of the arena cannot be registered with {self._device.name}: {error}")
            raise OSError(errno.ENOMEM, self.failure) from error
        with self._lock:
            self._sizes[address] = data.nbytes
            self.registered_bytes += data.nbytes

    def last_view_gone(self, address: int, unmap: Callable[[], None]) -> None:
        """At any point of any thread."""
        if self._closed:  # somebody kept a view for longer than the engine lived: nothing is copied any more
            unmap()
        else:
            self._unmapping.put((address, unmap))

    def close(self) -> None:
        """What has no view any more is unmapped; after the client was closed, while the device is there."""
        if self._thread is not None:
            self._unmapping.put(None)
            self._thread.join()
        self._closed = True
        with self._lock:
            left = list(self._sizes)
        for address in left:
            self._unregister(address)

    def _unmap(self) -> None:
        while (entry := self._unmapping.get()) is not None:
            address, unmap = entry
            self._unregister(address)
            unmap()
            del entry, unmap

    def _unregister(self, address: int) -> None:
        with self._lock:
            size = self._sizes.pop(address, 0)
            self.registered_bytes -= size
        if not size:
            return
        try:
            self._device.unregister(address)
        except DeviceFailed as error:  # the device is lost, and with it what it knew
            log.warning("%s", error)
