"""What a tier below DRAM asks of DRAM."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.types import SegmentId


class SlotMemory(Protocol):
    def view(self, segment: SegmentId, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """Writable bytes, alive as long as the view. Raises NotFound or BadRequest."""
