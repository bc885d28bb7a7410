"""One vLLM engine after another over one daemon: what the first computed, the second loads. Runs where vLLM is."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPT_TOKENS = 900
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit(f"{sys.executable} has no vLLM: README.md in this folder says which Python has")
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        command = [sys.executable, "-P", "-m", "kvstore", f"--run-dir={folder}/run", "--dram-bytes=256M"]
        daemon = subprocess.Popen([*command, "--segment-bytes=64M", "--log-level=warning"])
        try:
            make_model(Path(folder) / "model")
            answers = [run_engine(folder) for _ in range(2)]
        finally:
            daemon.terminate()
            daemon.wait(20)
    for number, answer in enumerate(answers):
        print(
            f"engine {number + 1}: {answer['cached']:>4} of {PROMPT_TOKENS} prompt tokens from the store, "
            f"first token after {answer['ttft_ms']:.0f} ms, answer {answer['tokens']}"
        )
    assert answers[0]["tokens"] == answers[1]["tokens"]
    assert answers[1]["cached"] > 0


def make_model(path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        initializer_range=0.1,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(path)


def run_engine(folder: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-P", __file__, folder],
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def engine(folder: str) -> None:
    """In a process of its own: prints one line of JSON."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=f"{folder}/model",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        block_size=32,
        disable_log_stats=False,
        kv_transfer_config={
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.gpu_worker.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"run_dir": f"{folder}/run"},
        },
    )
    parameters = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    ask(llm, [5] * 100, parameters)  # whatever is done only once
    output = ask(llm, [3 + n * n % 500 for n in range(PROMPT_TOKENS)], parameters)
    llm.llm_engine.engine_core.shutdown()  # saves what is still queued
    print(
        json.dumps(
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "ttft_ms": 1e3 * output.metrics.first_token_latency,
            }
        )
    )


def ask(llm, tokens, parameters):  # type: ignore[no-untyped-def]
    return llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)[0]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        engine(sys.argv[1])
    else:
        main()
