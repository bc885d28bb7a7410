"""A conversation of several turns with a real vLLM engine that forgets between turns, as behind a restart: time to the
first token with kvstored beside it, and without any store.

Each turn's prompt is the whole history and some new tokens. Both arms serve the same turns, one request at a time;
the orders of arms alternate over the rounds. The answers must be the same tokens. CPU seconds are those of the engine's
process and of the daemon, per arm, for the turns alone.

    .cache/vllm-venv/bin/python -P benchmarks/vllm_turns.py --model DIR [--quick] [--json] [--out]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import vllm
from harness import arguments, finish, heading, some

FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 640, 160, 32
BLOCK = 32
ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Arm:
    """One engine in a process of its own."""

    def __init__(self, name: str, model: Path, run_dir: Path | None) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--engine", str(run_dir or ""), "--model", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        self.receive()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine of {self.name} ended"
        return dict(json.loads(line))

    def ask(self, tokens: list[int], answer: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"tokens": tokens, "answer": answer}) + "\n")
        self.process.stdin.flush()
        return self.receive()


def serve(model: str, run_dir: str) -> None:
    """An engine that answers lines of {"tokens", "answer"}, and forgets after each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    connector = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.gpu_worker.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"run_dir": run_dir},
    }
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=4096,
        block_size=BLOCK,
        disable_log_stats=False,
        kv_transfer_config=connector if run_dir else None,
    )

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    say({})
    for line in sys.stdin:
        asked = json.loads(line)
        parameters = SamplingParams(
            max_tokens=asked["answer"], temperature=0, detokenize=False, ignore_eos=True
        )
        (output,) = llm.generate([{"prompt_token_ids": asked["tokens"]}], parameters, use_tqdm=False)
        if run_dir:  # what a user's pause between turns is for
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            get_kv_transfer_group().worker_side.saver.flush(60.0)
        assert llm.reset_prefix_cache()
        say(
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "ttft_s": output.metrics.first_token_latency,
            }
        )
    llm.llm_engine.engine_core.shutdown()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def conversation(arm: Arm, seed: int, vocabulary: int, count: int) -> list[dict[str, Any]]:
    chosen = random.Random(seed)

    def said(count: int) -> list[int]:
        return [chosen.randrange(100, vocabulary) for _ in range(count)]

    history = said(FIRST_TOKENS)
    turns = []
    for _ in range(count):
        result = arm.ask(history, ANSWER_TOKENS)
        turns.append({**result, "prompt": len(history)})
        history = history + result["tokens"] + said(TURN_TOKENS)
    return turns


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--rounds", type=some, help="default 3, or 1 with --quick")
    parser.add_argument("--turns", type=some, help="default 6, or 3 with --quick")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        serve(str(options.model), options.engine)
        return 0
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.turns = options.turns or (3 if options.quick else 6)
    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-P", "-m", "kvstore", f"--run-dir={run_dir}", "--dram-bytes=1G"]
        daemon = subprocess.Popen([*command, "--segment-bytes=128M"], stderr=subprocess.DEVNULL)
        try:
            arms = [Arm("no store", options.model, None), Arm("kvstored", options.model, run_dir)]
            for arm in arms:
                arm.ask(list(range(100, 400)), 4)  # what is done once only
            began = [cpu_seconds(arm.process.pid) for arm in arms]
            daemon_began = cpu_seconds(daemon.pid)
            results: dict[str, list[list[dict[str, Any]]]] = {arm.name: [] for arm in arms}
            for number in range(options.rounds):
                for arm in arms if number % 2 == 0 else arms[::-1]:
                    results[arm.name].append(conversation(arm, number, vocabulary, options.turns))
            spent = {
                arm.name: cpu_seconds(arm.process.pid) - before
                for arm, before in zip(arms, began, strict=True)
            }
            spent["kvstored"] += cpu_seconds(daemon.pid) - daemon_began
        finally:
            daemon.terminate()
            daemon.wait(30)
        for arm in arms:
            assert arm.process.stdin is not None
            arm.process.stdin.close()
            arm.process.wait(60)
    answers = [[[turn["tokens"] for turn in turns] for turns in results[arm.name]] for arm in arms]
    same = answers[0] == answers[1]
    print(f"{heading(__file__)}, vLLM {vllm.__version__}, {options.model.name}, fp32")
    print(f"{options.rounds} conversations, medians; answers {'are the same' if same else 'DIFFER'}\n")
    print("turn  prompt   TTFT no store   TTFT kvstored   hit rate")
    rows = []
    for turn in range(options.turns):
        ttft = {
            name: statistics.median(1e3 * turns[turn]["ttft_s"] for turns in runs)
            for name, runs in results.items()
        }
        mine = [turns[turn] for turns in results["kvstored"]]
        rate = sum(each["cached"] for each in mine) / sum(each["prompt"] for each in mine)
        told = {f"{name.replace(' ', '_')}_ttft_ms": ms for name, ms in ttft.items()}
        rows.append({"turn": turn + 1, "prompt_tokens": mine[0]["prompt"], **told, "hit_rate": rate})
        print(
            f"{turn + 1:>4} {mine[0]['prompt']:>7} {ttft['no store']:>12.0f} ms {ttft['kvstored']:>12.0f} ms"
            f" {rate:>10.1%}"
        )
    print("\nCPU seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items()))
    finish(__file__, options, rows, [], key=("turn",))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
