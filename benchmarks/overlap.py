"""Loading and saving beside computing: AttentionStore's figures 18, 19 and 20.

Pairs take turns, one compute thread: a turn whose history is loaded from DRAM, and the same turn whose history the pool
has kept (figure 18: histories of several lengths, new tokens behind them; 19: read buffers of several sizes, and none,
where all is loaded before the first layer computes). The median of the pairs' own ratios is the figure; "spread" is the
distance of their quartiles. "alone" is the load by itself, as a share of the turn with its history kept: what is to be
hidden. In the rows with a link, each layer takes as long as on a link that needs so much of the kept turn for all of
them: what a machine does whose memory is slower than its computing.

Figure 20: prompts of several lengths and 20 decoding steps, with saving and without. "behind" is the worker as it is;
"in line" waits for each step's chunks to be in the store before the next step.

    make bench-overlap ARGS='--quick --json'
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arguments, finish, heading, some

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from turns import BOUND_S, daemon, smollm2_shape

from kvstore.client import connect
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.device import CpuDevice, ThreadStream

DECODED = 20
FIGURES = (18, 19, 20)
KEY = ("figure", "model", "history_tokens", "new_tokens", "read_buffer", "link_share")


class LinkedStream(ThreadStream):
    """Each work takes at least `device.work_s`: a link of that speed."""

    def _before(self) -> None:
        if self.name == "kv-read" and self._device.work_s:  # type: ignore[attr-defined]
            time.sleep(self._device.work_s)  # type: ignore[attr-defined]


class LinkedDevice(CpuDevice):
    work_s = 0.0

    def stream(self, name: str) -> ThreadStream:
        self._streams.append(LinkedStream(name, self))
        return self._streams[-1]


def models(names: str) -> dict[str, LlamaForCausalLM]:
    """Random weights are as fast as trained ones."""
    torch.manual_seed(0)
    made: dict[str, LlamaForCausalLM] = {}
    if "SmolLM2" in names:
        made["SmolLM2-135M"] = smollm2_shape()
    if "300M" in names:
        config = LlamaConfig(
            vocab_size=32_000,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=20,
            num_attention_heads=16,
            num_key_value_heads=16,
            head_dim=64,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
        made["random 300M"] = LlamaForCausalLM(config).eval()
    return made


class Text:
    def __init__(self, seed: int) -> None:
        self._draw = torch.Generator().manual_seed(seed)

    def __call__(self, count: int) -> list[int]:
        tokens: list[int] = torch.randint(0, 30_000, (count,), generator=self._draw).tolist()
        return tokens


def loading(
    name: str,
    model: LlamaForCausalLM,
    run_dir: str,
    history: int,
    new: int,
    *,
    pairs: int,
    buffers: tuple[int | None, ...],
    link_share: float = 0.0,
    make_device: Callable[[], Any] = LinkedDevice,
    clear: float | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """A row for each of `buffers`: layers, None: ours. `options`: of the engines that load. `clear`: where sums may
    come in another order, how far the largest logit is above the second for the token to be told by it."""
    text = Text(history + new)
    past = text(history)
    chunks = (history + new) // 64 + 4
    keeping = BatchEngine(model, pool_chunks=chunks + (pairs + 3) * (new // 64 + 2), prefill_tokens=1024)
    devices = {buffer: make_device() for buffer in buffers}
    engines = {
        buffer: BatchEngine(
            model,
            lambda: connect(run_dir, timeout_s=BOUND_S),
            pool_chunks=chunks,
            retain=False,
            prefill_tokens=1024,
            read_buffer=buffer,
            device=devices[buffer],
            **options,
        )
        for buffer in buffers
    }
    ratios: dict[int | None, list[float]] = {buffer: [] for buffer in buffers}
    spent: dict[int | None, list[float]] = {buffer: [] for buffer in buffers}
    kept_s: list[float] = []
    alone: list[float] = []
    try:
        first = next(iter(engines.values()))
        first.turn("", past, 1)
        keeping.turn("", past, 1)
        assert first.flush(BOUND_S)
        # Not saved: what is measured is loading
        for engine in engines.values():
            engine._store.saver._queue_bytes_max = 0  # type: ignore[union-attr]
        loads = {buffer: watch_loads(engine) for buffer, engine in engines.items()}
        for number in range(-2, pairs):
            prompt = [*past, *text(new)]
            if number == 0 and link_share:
                for device in devices.values():
                    device.work_s = (
                        link_share * statistics.median(kept_s[-2:]) / model.config.num_hidden_layers
                    )
            kept = keeping.turn("", prompt, 1)
            assert kept.reused.hbm == history, kept
            kept_s.append(kept.ttft_s)
            for buffer, engine in engines.items():
                turn = engine.turn("", prompt, 1)
                assert turn.reused.dram == history, turn
                same = turn.tokens == kept.tokens or (clear is not None and kept.gaps[0] < clear)
                assert same, "a loaded history gives the token that a kept one gives"
                if number >= 0:
                    ratios[buffer].append(turn.ttft_s / kept.ttft_s)
                    spent[buffer].append(turn.ttft_s)
                    alone.append(loads[buffer][-1].seconds / kept.ttft_s)
    finally:
        for engine in (*engines.values(), keeping):
            engine.close()
    return [
        {
            "figure": 19 if len(buffers) > 1 else 18,
            "model": name,
            "history_tokens": history,
            "new_tokens": new,
            "read_buffer": "ours" if buffer is None else "no pre-loading" if buffer >= 1000 else buffer,
            "link_share": link_share,
            "pairs": pairs,
            "kept_ms": statistics.median(kept_s[2:]) * 1e3,
            "loaded_ms": statistics.median(spent[buffer]) * 1e3,
            "over_kept": statistics.median(ratios[buffer]),
            "spread": spread(ratios[buffer]),
            "alone": statistics.median(alone),
            "load_gb_per_s": statistics.median(load.bytes / load.seconds / 1e9 for load in loads[buffer]),
        }
        for buffer in buffers
    ]


def watch_loads(engine: BatchEngine) -> list[Any]:
    """Gets each load that has ended."""
    loads: list[Any] = []
    scheduler = engine._scheduler
    restored = scheduler._restored

    def note(request: Any) -> bool:
        load = request.load
        whole = restored(request)
        loads.append(load)
        return whole

    scheduler._restored = note  # type: ignore[method-assign]
    return loads


def saving(
    name: str, model: LlamaForCausalLM, run_dir: str, prompt_tokens: int, *, rounds: int, **more: Any
) -> dict[str, Any]:
    """`more`: of the engines."""
    text = Text(7 * prompt_tokens)
    chunks = (prompt_tokens + DECODED) // 64 + 4
    options: dict[str, Any] = {"pool_chunks": chunks, "retain": False, "prefill_tokens": 512} | more
    plain = BatchEngine(model, **options)
    behind, in_line = (
        BatchEngine(model, lambda: connect(run_dir, timeout_s=BOUND_S), **options) for _ in range(2)
    )
    ratios: dict[str, list[float]] = {"behind": [], "in_line": []}
    plain_s = []
    try:
        for number in range(-1, rounds):
            prompt = text(prompt_tokens)  # never seen: all of it is saved, each time
            without_s = took(plain.turn, "", prompt, DECODED)
            behind_s = took(behind.turn, f"b{number}", [1, *prompt[1:]], DECODED)
            assert behind.flush(BOUND_S)
            in_line_s = took(stepped, in_line, [2, *prompt[1:]])
            if number >= 0:
                plain_s.append(without_s)
                ratios["behind"].append(behind_s / without_s)
                ratios["in_line"].append(in_line_s / without_s)
        dropped = behind.save_counters["chunks_dropped"] + behind.save_counters["chunks_refused"]
    finally:
        for engine in (plain, behind, in_line):
            engine.close()
    return {
        "figure": 20,
        "model": name,
        "history_tokens": 0,
        "new_tokens": prompt_tokens,
        "read_buffer": "",
        "link_share": 0.0,
        "pairs": rounds,
        "plain_ms": statistics.median(plain_s) * 1e3,
        "behind": statistics.median(ratios["behind"]),
        "spread": spread(ratios["behind"]),
        "in_line": statistics.median(ratios["in_line"]),
        "dropped": dropped,
    }


def stepped(engine: BatchEngine, prompt: list[int]) -> None:
    """Each step waits until what it has computed is saved."""
    engine.add(prompt, DECODED)
    while engine.live:
        engine.step()
        engine.flush(BOUND_S)


def took(what: Callable[..., object], *arguments: object) -> float:
    began = time.perf_counter()
    what(*arguments)
    return time.perf_counter() - began


def spread(values: list[float]) -> float:
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def main() -> int:
    options = arguments(__doc__)
    options.add_argument("--threads", type=some, default=1, help="threads that compute")
    options.add_argument("--pairs", type=int, default=0, help="of turns in a row of figures 18 and 19")
    options.add_argument(
        "--models", default="", help='"SmolLM2", "300M" or both (none: both, quick: SmolLM2)'
    )
    options.add_argument(
        "--figures", nargs="*", type=int, choices=FIGURES, default=FIGURES, help="which (all)"
    )
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    quick = chosen.quick
    pairs = chosen.pairs or (4 if quick else 20)
    print(heading(__file__), f"{chosen.threads} compute thread(s)", sep=", ")
    rows: list[dict[str, Any]] = []
    with daemon() as run_dir:
        for name, model in models(chosen.models or ("SmolLM2" if quick else "SmolLM2 300M")).items():
            small = name.startswith("SmolLM2")
            turns = ((512, 32),) if quick else ((512, 32), (2048, 32), (2048, 128))
            for history, new in turns if 18 in chosen.figures else ():
                rows += loading(name, model, run_dir, history, new, pairs=pairs, buffers=(None,))
                show(rows[-1])
            layers = model.config.num_hidden_layers
            few = min(pairs, 3) if quick else pairs
            shares = (0.7,) if quick else (0.7, 1.5)
            for share in shares if small and 19 in chosen.figures else ():
                buffers = (1000, 0, None) if quick else (1000, 0, 5, layers // 2, None)
                made = loading(
                    name,
                    model,
                    run_dir,
                    256 if quick else 1024,
                    100,
                    pairs=few,
                    buffers=buffers,
                    link_share=share,
                )
                rows += made
                for row in made:
                    show(row)
            prompts = (256,) if quick else (1024, 1600)
            for tokens in prompts if 20 in chosen.figures else ():
                rows.append(saving(name, model, run_dir, tokens, rounds=3 if quick else 10 if small else 5))
                show(rows[-1])
    if quick:
        print(
            "left out: histories and prompts over 512 tokens, read buffers of 5 and 15 layers, the 300M model"
        )
    return finish(__file__, chosen, rows, goals_of(rows), key=KEY)


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    goals = []
    for row in rows:
        what = f"{row['model']}, {row['history_tokens']} + {row['new_tokens']} tokens"
        if row["figure"] == 20:
            what = f"{row['model']}, prompt of {row['new_tokens']} tokens"
            goals.append(Goal(f"{what}: with saving against without", row["behind"], "ratio", 1.03, "<="))
        elif row["read_buffer"] == "ours" and row["alone"] <= 0.8:
            link = f", a link of {row['link_share']:g}" if row["link_share"] else ""
            goals.append(Goal(f"{what}{link}: loaded against kept", row["over_kept"], "ratio", 1.05, "<="))
    return goals


def show(row: dict[str, Any]) -> None:
    if row["figure"] == 20:
        print(
            f"figure 20  {row['model']:>12}  prompt {row['new_tokens']:>5} + {DECODED}: {row['plain_ms']:6.0f} ms "
            f"without saving; behind x {row['behind']:.3f} (spread {row['spread']:.3f}), "
            f"in line x {row['in_line']:.3f}; {row['dropped']} dropped",
            flush=True,
        )
        return
    link = f", link {row['link_share']:g}" if row["link_share"] else ""
    print(
        f"figure {row['figure']}  {row['model']:>12}  {row['history_tokens']:>5} + {row['new_tokens']:>4}: read buffer "
        f"{row['read_buffer']!s:>14}{link}: {row['loaded_ms']:6.0f} ms, kept {row['kept_ms']:6.0f} ms, "
        f"x {row['over_kept']:.3f} (spread {row['spread']:.3f}), load alone x {row['alone']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
