"""Requests that begin alike, answered together: they share the KV of their common prompt, and come and go.

.venv/bin/python examples/batching.py [--run-dir DIR]    # DIR of a kvstored: what was computed once is loaded next time
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to the others
sys.path.insert(0, str(Path(__file__).parent))  # the examples lie beside one another, in no package

from kvstore.startup import loading

with loading("this example", extra="worker"):
    from conversations import FERRY, SYSTEM
    from models import prepare
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from kvstore.client import connect
    from kvstore.gpu_worker.batching import BatchEngine
    from kvstore.gpu_worker.sampling import Sampling

QUESTIONS = ("What is the ship called?", "When is the first sailing on Saturdays?", "What does a dog pay?")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--run-dir", default="", help="of a running kvstored; none: nothing is kept")
    options.add_argument("--random", action="store_true", help="a tiny random model, whatever is installed")
    chosen = options.parse_args()
    logging.disable_progress_bar()
    model = prepare(Path(__file__).parent.parent / ".cache" / "models", random=chosen.random)
    engine = BatchEngine(
        AutoModelForCausalLM.from_pretrained(model.folder),
        (lambda: connect(chosen.run_dir)) if chosen.run_dir else None,
        pool_chunks=200,
    )
    answers: dict[int, list[int]] = {}
    for seed, question in enumerate(QUESTIONS):
        prompt = model.opening(SYSTEM, f"{FERRY}\n\n{question}")
        sampling = Sampling(temperature=0.7, top_p=0.9, seed=seed)
        answers[engine.add(prompt, 24, sampling=sampling, stop_tokens=[model.end])] = []
    for output in engine.run():
        answers[output.request].append(output.token)
    for question, tokens in zip(QUESTIONS, answers.values(), strict=True):
        print(f"{question}\n    {model.tokenizer.decode(tokens)}")
    engine.flush(timeout_s=10)
    engine.close()
    did = engine.counters
    print(
        f"{did['computed_tokens']} tokens computed, {did['adopted_tokens']} shared, {did['restored_tokens']} loaded "
        f"from the store; at most {engine.pool.peak_bytes >> 20} MiB of KV"
    )


if __name__ == "__main__":
    main()
