"""The card: what it is, and the rates that others are held against."""

from __future__ import annotations

import torch

from gpu.section import Row, Section, Steps


class Card(Section):
    """Its name, and the rates of copies, reads and matrix products."""

    def steps(self) -> Steps:
        yield "device", self.described
        yield "bandwidth", self.bandwidth
        yield "matrix product", self.matrix_product

    def described(self) -> Row:
        row: Row = {"torch": torch.__version__, "dry_run": not self.on.real}
        if self.on.real:
            card = torch.cuda.get_device_properties(0)
            row |= {
                "name": card.name,
                "l2_bytes": card.L2_cache_size,
                "memory_bytes": card.total_memory,
                "processors": card.multi_processor_count,
            }
            row |= {"triton": __import__("triton").__version__, "cuda": torch.version.cuda}
        return row

    def bandwidth(self) -> Row:
        """Bytes a second: of a copy (read and written bytes together) and of reading alone."""
        source = torch.ones(1 << 30 if self.on.real else 1 << 10, dtype=torch.float16, device=self.on.device)
        target = torch.empty_like(source)
        self.speeds["copy"] = 2 * source.nbytes / self.seconds(lambda: target.copy_(source))
        self.speeds["read"] = source.nbytes / self.seconds(lambda: torch.amax(source))
        return {f"{name}_tb_per_s": round(speed / 1e12, 3) for name, speed in self.speeds.items()}

    def matrix_product(self) -> Row:
        """The rate that prefill is held against."""
        size = 8192 if self.on.real else 32
        a, b = (torch.randn(size, size, device=self.on.device, dtype=torch.bfloat16) for _ in range(2))
        self.speeds["flops"] = 2 * size**3 / self.seconds(self.captured(lambda: a @ b))
        return {"tflop_per_s": round(self.speeds["flops"] / 1e12, 1)}
