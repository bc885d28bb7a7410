"""Two vLLM engines of one node, one of which computes prompts and the other answers (P/D disaggregation): time to the
first token of the one that answers, with the prompt's KV from the first one through kvstored, and computed again.

The first engine is asked for one token, and its `kv_transfer_params` are handed to the second one, as routers do. The
engines' own prefix caches are off. Answers must be the same tokens. A request that both engines serve takes what both
take, so that is told too: it pays where the engine that answers must not stop for long prompts.

    make bench-vllm_pd ARGS='--quick --json'
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arguments, finish, heading, some
from vllm_lmcache import ROOT, Engine, end, serve, start_kvstored

LENGTHS = (264, 1032, 2056, 4104)
QUICK = (264, 1032)
ANSWER_TOKENS = 16


def measure(
    engines: dict[str, Engine], rounds: int, lengths: tuple[int, ...], vocabulary: int
) -> list[dict[str, Any]]:
    """A row per round and length."""
    for engine in engines.values():
        for number in range(2):  # what is done once only
            engine.ask([number + 1, *(100 + n % (vocabulary - 100) for n in range(600))])
    rows = []
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        chosen = random.Random(number)
        for length in lengths:
            tokens = [chosen.randrange(100, vocabulary) for _ in range(length)]
            alone = engines["alone"].send(tokens=tokens, count=ANSWER_TOKENS, pause_s=0.0)
            prefill = engines["prefill"].send(
                tokens=tokens, count=1, handed={"do_remote_decode": True}, pause_s=0.0
            )
            decode = engines["decode"].send(
                tokens=tokens, count=ANSWER_TOKENS, handed=prefill["handed"], pause_s=0.0
            )
            rows.append(
                {
                    "length": length,
                    "alone_ms": alone["ttft_ms"],
                    "prefill_ms": prefill["ttft_ms"],
                    "decode_ms": decode["ttft_ms"],
                    "cached": decode["cached"],
                    "same": alone["tokens"] == decode["tokens"] and alone["tokens"][:1] == prefill["tokens"],
                }
            )
    return rows


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--model", type=Path, help="Hugging Face folder (default: the one that `make demo` made)"
    )
    parser.add_argument("--rounds", type=some, help="default 5, or 2 with --quick")
    parser.add_argument(
        "--lengths", help="of the prompts, in tokens, with commas between (default: 264,1032,2056,4104)"
    )
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        serve(str(options.model), options.engine)
        return 0
    models = sorted((ROOT / ".cache" / "models").glob("smollm2-*"))
    if options.model is None and not models:
        parser.error("no model: give one with --model, or run `make demo` once")
    model = options.model or models[0]
    lengths: Sequence[int] = QUICK if options.quick else LENGTHS
    if options.lengths:
        lengths = tuple(int(length) for length in options.lengths.split(","))
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    engines: dict[str, Engine] = {}
    stores: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="kvs-") as name:
        folder = Path(name)
        try:
            told = start_kvstored(folder, 1 << 30, stores)
            roles = {"alone": None, "prefill": told, "decode": told}
            for arm, connector in roles.items():
                engines[arm] = Engine(arm, model, folder, None, json.dumps(connector or {}))
            rows = measure(engines, options.rounds or (2 if options.quick else 5), lengths, vocabulary)
        finally:
            for engine in engines.values():
                engine.end()
            for store in stores:
                end(store)
    same = all(row["same"] for row in rows)
    print(heading(__file__))
    print(f"{model.name}, fp32, medians; answers {'are the same' if same else 'DIFFER'}\n")
    print("prompt   computed by the engine   prefill engine   decode engine   decode/computed   of it loaded")
    table, goals = [], []
    for length in lengths:
        mine = [row for row in rows if row["length"] == length]
        line: dict[str, Any] = {"prompt_tokens": length} | {
            name: statistics.median(row[name] for row in mine)
            for name in ("alone_ms", "prefill_ms", "decode_ms", "cached")
        }
        line["ratio"] = line["decode_ms"] / line["alone_ms"]
        table.append(line)
        print(
            f"{length:>6} {line['alone_ms']:>21.0f} ms {line['prefill_ms']:>13.0f} ms {line['decode_ms']:>12.0f} ms"
            f" {line['ratio']:>17.2f} {line['cached'] / length:>14.1%}"
        )
        goals.append(
            Goal(f"TTFT of {length} tokens, handed over / computed", line["ratio"], "ratio", 0.5, "<=")
        )
    finish(__file__, options, table, goals, key=("prompt_tokens",))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
