"""`model.generate` of transformers beside a real daemon: restarts, a daemon that is killed, one that stands still."""

from __future__ import annotations

import signal

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvstore.gpu_worker.generate import StoredGenerator

from .conftest import Daemon

T = 16


def tiny() -> LlamaForCausalLM:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


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
