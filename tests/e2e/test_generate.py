"""`model.generate` of transformers beside a real daemon: restarts, a daemon that is killed, one that stands still."""

from __future__ import annotations

import signal

import torch
from transformers import LlamaForCausalLM

from kvstore.gpu_worker.generate import StoredGenerator

from ..small_models import tiny_llama
from .conftest import Daemon

T = 16


def tiny() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    return tiny_llama(layers=3)


def test_a_batch_that_comes_back(daemon: Daemon) -> None:
    """To another process, as far as the daemon knows; then with the daemon stopped, and killed."""
    model = tiny()
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 256, (count,), generator=generator).tolist() for count in (150, 90)]
    inputs = {
        "input_ids": torch.tensor([rows[0], [0] * 60 + rows[1]]),
        "attention_mask": torch.tensor([[1] * 150, [0] * 60 + [1] * 90]),
    }
    expected = model.generate(**inputs, max_new_tokens=20)
    run_dir = str(daemon.run_dir)
    with StoredGenerator(model, run_dir, chunk_tokens=T) as first:
        assert torch.equal(first.generate(**inputs, max_new_tokens=20), expected)
        assert first.flush()
        assert first.save_counters["chunks_saved"] == 169 // T + 109 // T
    with StoredGenerator(model, run_dir, chunk_tokens=T) as second:
        assert torch.equal(second.generate(**inputs, max_new_tokens=20), expected)
        assert second.counters["loaded_tokens"] == 140 + 80, (
            "up to where the short row's last whole chunk ends"
        )
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            assert torch.equal(second.generate(**inputs, max_new_tokens=20), expected)
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        daemon.process.kill()
        daemon.process.wait()
        assert torch.equal(second.generate(**inputs, max_new_tokens=20), expected)
