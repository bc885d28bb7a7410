"""What a language model makes of a text whose older half was cut, by what was done with the KV of the rest.

Protocol: W tokens of context, the first half is dropped, the W/2 tokens that follow the context are scored; windows are
spread evenly over the text. Compared with all that remains computed anew: perplexity, KL(recomputed || method), and how
often both have the same first choice. Each way is computed by the engine's own forward calls on its paged pool; what is
reused is read where it lies, by turned queries. The text is WikiText-2 by default, the model SmolLM2-135M.

The rows "attention mass" keep as many tokens, but of the older half those, in runs, that the last tokens of the context
attend to most, instead of the first ones of the newer half; they are compared with their own text computed anew.
"KL uncut" is KL(nothing was cut || method): what the cut itself costs.

    make bench-quality ARGS='--json'                            (W 512)
    make bench-quality ARGS='--window 2048 --windows 6 --json'
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from harness import Goal, arguments, finish, heading, some

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from models import prepare
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvstore.gpu_worker.forward import Forward
from kvstore.gpu_worker.hbm_pool import HbmPool
from kvstore.gpu_worker.layout import CHUNK_TOKENS, Geometry
from kvstore.gpu_worker.request import Request
from kvstore.gpu_worker.sampling import GREEDY, Sampler
from kvstore.gpu_worker.truncation import MASS_RUN_TOKENS, Undecided
from kvstore.kernels.stretches import Stretch

ROOT = Path(__file__).parent.parent
TEXT = ROOT.parent / "shared" / "data" / "text" / "wikitext2_raw_test.txt.zst"
SIZE = CHUNK_TOKENS
SINKS = 4
MASS_SHARES = (0.125, 0.25, 0.5)
PROBED_LAYER = 1
"""Whose values say how far the KV of a token is from what it would be without the cut text (CacheBlend, arXiv
2405.16444, looks at the second layer, too)."""
GOALS = {512: (0.25, 0.016, 0.94), 2048: (0.15, 0.016, 0.94)}
"""By window: share recomputed at most, KL at most, agreement at least; perplexity within 1.2 %."""


class Engine:
    """The model's forward calls, over a pool that holds one window's KV."""

    def __init__(self, model: PreTrainedModel, window: int) -> None:
        self.model = model
        self.pool = HbmPool(Geometry.of(model), 3 * window // SIZE + 8)
        self.forward = Forward(model, self.pool, sequences_max=1, tokens_max=2 * window, share=False)

    def compute(
        self,
        tokens: Sequence[int],
        *,
        stretches: Sequence[Stretch] = (),
        jumps: Sequence[tuple[int, int]] = (),
        observe: bool = False,
    ) -> tuple[Request, torch.Tensor]:
        """The logits after each token; the request holds its chunks until `drop`."""
        request = Request(0, list(tokens), 1 << 30, frozenset(), Sampler(GREEDY), row=0)
        request.observe = observe
        request.stretches, request.jumps = list(stretches), list(jumps) or [(0, 0)]
        request.chunks = self.pool.take(-(-len(tokens) // SIZE)) or []
        logits = self.forward({request: len(tokens)}, every=True)[request]
        request.computed = len(tokens)
        return request, logits

    def drop(self, request: Request) -> None:
        self.pool.drop(request.chunks)

    def values(self, request: Request, begin: int, end: int) -> torch.Tensor:
        """V of one layer for its own tokens, [tokens, kv_heads x head_dim]."""
        layer = self.pool.layers[PROBED_LAYER]
        found = layer[request.chunks, 1].transpose(1, 2).flatten(0, 1).flatten(1)
        return found[begin:end].clone()


Chosen = Callable[[Engine, Request, Request, int], set[int]]
"""Which of the half that remains is computed anew: of engine, whole context, what was recomputed, half its length."""


def first(share: float) -> Chosen:
    return lambda engine, whole, anew, half: set(range(round(share * half)))


def most_deviating(share: float, head: int) -> Chosen:
    """The first `head` tokens, and those whose V in the probed layer are furthest from what they would be."""

    def choose(engine: Engine, whole: Request, anew: Request, half: int) -> set[int]:
        stored, wanted = engine.values(whole, half, 2 * half), engine.values(anew, 0, half)
        distance = (stored - wanted).norm(dim=1)
        distance[:head] = math.inf
        return set(distance.topk(round(share * half)).indices.tolist())

    return choose


def pieces(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Sorted numbers as stretches [begin, end)."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = found[-1][0], number + 1
        else:
            found.append((number, number + 1))
    return found


def moved(whole: Request, begin: int, end: int, *, to: int, delta: bool = True, at: int = 0) -> list[Stretch]:
    """Tokens [begin, end) of the context; the first stands at position `to`."""
    found = []
    while begin < end:
        count = min(SIZE - begin % SIZE, end - begin)
        move = to - begin if delta else 0
        found.append(Stretch(whole.chunks[begin // SIZE], begin % SIZE, count, delta=move, at=at))
        begin, to = begin + count, to + count
    return found


def logits_of(
    engine: Engine,
    whole: Request,
    half: int,
    context: Sequence[int],
    scored: Sequence[int],
    anew: set[int],
    way: str,
) -> torch.Tensor:
    """After the last token that remains and each that is scored but the last, [half, vocabulary]. The last token that
    remains is always computed: its KV alone says nothing of what comes next."""
    rest = context[half:]
    sinks = SINKS if way == "sinks" else 0
    recomputed = sorted({*anew, half - 1})
    own = [rest[number] for number in recomputed] + list(scored[:-1])
    jumps, seen = [], []
    number = 0
    for begin, end in pieces(recomputed):
        jumps.append((number, sinks + begin))
        number += end - begin
    if recomputed[-1] != half - 1 or not own:
        raise AssertionError("the last token has to be among them")
    kept = sorted(set(range(half)) - set(recomputed))
    for begin, end in pieces(kept):
        at = sum(one < begin for one in recomputed)
        seen += moved(
            whole, half + begin, half + end, to=sinks + begin, delta=way != "naive positions", at=at
        )
    if sinks:
        seen += moved(whole, 0, sinks, to=0)
    request, logits = engine.compute(own, stretches=seen, jumps=jumps)
    engine.drop(request)
    return logits[len(recomputed) - 1 :]


def by_mass(whole: Request, half: int, share: float) -> list[tuple[int, int]]:
    """What is kept of the context: runs of the older half by mass, and the end, as spans."""
    assert whole.observation is not None and whole.observation.own is not None
    count = int(share * half) // MASS_RUN_TOKENS * MASS_RUN_TOKENS
    masses = whole.observation.own[:half].tolist()
    open_ = Undecided(b"", (), (), ((0, half),), (), count, by_mass=True)
    return [*pieces(open_.choose(masses)), (half + count, 2 * half)]


def kept_by_mass(
    engine: Engine, whole: Request, half: int, context: Sequence[int], scored: Sequence[int], share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with stored KV, and with the same text computed anew."""
    spans = by_mass(whole, half, share)
    text = [token for begin, end in spans for token in context[begin:end]]
    seen, at = [], 0
    for begin, end in spans:
        end = min(end, 2 * half - 1)
        seen += moved(whole, begin, end, to=at)
        at += end - begin
    stored, found = engine.compute([text[-1], *scored[:-1]], stretches=seen, jumps=[(0, half - 1)])
    engine.drop(stored)
    anew, wanted = engine.compute([*text, *scored[:-1]])
    engine.drop(anew)
    return found.log_softmax(-1), wanted[half - 1 :].log_softmax(-1)


def measure(
    model: PreTrainedModel,
    tokens: Sequence[int],
    window: int,
    windows: int,
    ways: dict[str, Chosen],
    keep: Path | None = None,
) -> list[dict[str, Any]]:
    """`keep`: a file that has what earlier runs measured, window by window, and gets what this one does."""
    engine, half = Engine(model, window), window // 2
    length = window + half
    masses = {f"attention mass, {share:.4g}": share for share in MASS_SHARES}
    known: dict[str, Any] = json.loads(keep.read_text()) if keep is not None and keep.is_file() else {}
    sums: dict[str, list[float]] = {name: [0.0] * 5 for name in ("recomputed", *ways, *masses, "not cut")}
    for number in range(windows):
        name_of = f"{window} {windows} {number}"
        if (found_before := known.get(name_of)) is not None and found_before.keys() == sums.keys():
            for name, values in found_before.items():
                sums[name] = [a + b for a, b in zip(sums[name], values, strict=True)]
            continue
        before = {name: list(values) for name, values in sums.items()}
        start = (len(tokens) - length) * number // max(1, windows - 1)
        context, scored = tokens[start : start + window], tokens[start + window : start + length]
        whole, _ = engine.compute(context, observe=True)
        uncut, logits = engine.compute([*context, *scored[:-1]])
        engine.drop(uncut)
        best = logits[window - 1 :].log_softmax(-1)
        fresh, logits = engine.compute([*context[half:], *scored[:-1]])
        wanted = logits[half - 1 :].log_softmax(-1)
        target = torch.tensor(scored)
        for name in sums:
            share = 1.0
            found = wanted
            reference = wanted
            if name == "not cut":
                found = reference = best
            elif name in masses:
                found, reference = kept_by_mass(engine, whole, half, context, scored, masses[name])
                share = 1 / half
            elif name != "recomputed":
                anew = ways[name](engine, whole, fresh, half)
                share = len(anew) / half
                found = logits_of(engine, whole, half, context, scored, anew, name).log_softmax(-1)
            sums[name][0] -= float(found.gather(1, target[:, None]).sum())
            sums[name][1] += float((reference.exp() * (reference - found)).sum())
            sums[name][2] += float((reference.argmax(-1) == found.argmax(-1)).sum())
            sums[name][3] += share
            sums[name][4] += float((best.exp() * (best - found)).sum())
        engine.drop(whole)
        engine.drop(fresh)
        print(f"window {number + 1} of {windows}", file=sys.stderr, flush=True)
        known[name_of] = {
            name: [a - b for a, b in zip(values, before[name], strict=True)] for name, values in sums.items()
        }
        if keep is not None:
            keep.write_text(json.dumps(known))
    scored_tokens = windows * half
    rows = []
    for name, (loss, divergence, same, share, uncut_kl) in sums.items():
        row = {
            "window": window,
            "method": name,
            "share_recomputed": round(share / windows, 4),
            "perplexity": math.exp(loss / scored_tokens),
            "kl": divergence / scored_tokens,
            "agreement": same / scored_tokens,
            "kl_uncut": uncut_kl / scored_tokens,
        }
        row["perplexity_ratio"] = row["perplexity"] / (rows[0]["perplexity"] if rows else row["perplexity"])
        rows.append(row)
        print(
            f"{name:28} {row['share_recomputed']:7.1%} recomputed   perplexity {row['perplexity']:8.2f} "
            f"(x {row['perplexity_ratio']:.4f})   KL {row['kl']:.4f}   same first choice {row['agreement']:.4f}   "
            f"KL uncut {row['kl_uncut']:.4f}",
            flush=True,
        )
    return rows


def text_of(path: Path) -> str:
    if path.suffix == ".zst":
        import zstandard

        return zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read().decode()
    return path.read_text()


def main() -> int:
    options = arguments(__doc__)
    options.add_argument("--text", type=Path, default=TEXT, help="a text, or one in zstd")
    options.add_argument("--window", type=some, default=512, help="tokens of context (default 512)")
    options.add_argument("--windows", type=some, default=12, help="how many (default 12)")
    options.add_argument(
        "--keep", type=Path, help="a file by which a run goes on where the one before was ended"
    )
    options.add_argument(
        "--shares", default="", help="shares to be recomputed, as .05,.1,.25 (default: by window)"
    )
    chosen = options.parse_args()
    if not chosen.text.is_file():
        print(f"--text {chosen.text}: no such file; nothing is measured")
        return finish(__file__, chosen, [], [])
    demo = prepare(ROOT / ".cache" / "models", random=False)
    model = AutoModelForCausalLM.from_pretrained(demo.folder, dtype=torch.float32).eval()
    tokens = demo.tokenizer.encode(text_of(chosen.text))
    window, windows = chosen.window, chosen.windows
    share, kl, agreement = GOALS.get(window, GOALS[512])
    shares = (
        [float(each) for each in chosen.shares.split(",")] if chosen.shares else [share / 4, share / 2, share]
    )
    if chosen.quick:
        window, windows, shares = 256, 2, [share]
    half = window // 2
    ways: dict[str, Chosen] = {
        "as it is": first(0),
        "naive positions": first(0),
        "sinks": first(0),
        "head chunk": first(min(1.0, SIZE / half)),
    }
    for each in shares:
        ways[f"head, share {each:.4g}"] = first(each)
        ways[f"head and most deviating, {each:.4g}"] = most_deviating(each, head=round(each * half / 4))
    print(heading(__file__))
    print(f"{demo.name}, {chosen.text.name}: {windows} windows of {window} tokens")
    rows = measure(model, tokens, window, windows, ways, chosen.keep)
    recomputing = [row for row in rows if row["method"].startswith("head")]
    ours = min(
        (row for row in recomputing if row["share_recomputed"] <= share + 1e-9), key=lambda row: row["kl"]
    )
    sinks = next(row for row in rows if row["method"] == "sinks")
    goals = [
        Goal("perplexity of ours against recomputing", ours["perplexity_ratio"], "x", 1.012, "<="),
        Goal("KL of ours", ours["kl"], "nats", kl, "<="),
        Goal("same first choice", ours["agreement"], "", agreement, ">="),
        Goal("share that ours recomputes", ours["share_recomputed"], "", share, "<="),
        Goal(
            "KL of the worst of ours against sinks",
            max(row["kl"] for row in recomputing if row["method"] != "head chunk") / sinks["kl"],
            "x",
            1.0,
            "<=",
        ),
    ]
    return finish(__file__, chosen, rows, goals, key=("window", "method"))


if __name__ == "__main__":
    sys.exit(main())
