"""What modules cost in quality: predictions over KV of modules, against full attention, with the engine that serves.

Questions with passages of two public sets (NaturalQuestions, MuSiQue: `longdoc/` of the data folder, `--data`; by
default ../shared/data), each passage a module; the answer's tokens are read one by one. SmolLM2-135M in float32.

    KL            of the predictions, nats a token        top-1       how often the likeliest token is the same
    perplexity    of the answers, and by how much it grows  passkey   numbers found of those that full attention finds

    alone         each module encoded after nothing, as in the paper
    beginning     after the text with which every prompt of the schema begins
    first N %     the first tokens of each module computed in place; `alone, first 15 %` is as EPIC's LegoLink (arXiv
                  2410.15332), made by us
    deviating N % of all modules, the tokens computed in place whose KV differs most from full attention in the second
                  layer; `alone, deviating 15 %` is as CacheBlend-15 (arXiv 2405.16444), made by us
    see all       arguments and text attend to all modules, those behind them included: the paper's pass

A run takes minutes: `--resume FILE` goes on where one that was stopped had come to.

    make bench-promptcache_quality ARGS='--quick --json'
"""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arguments, finish, heading
from promptcache import THREADS, encode, store
from shared_prefix import READY, smollm2

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoTokenizer

from kvstore.client import connect
from kvstore.gpu_worker.assembly import Assembly
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.promptcache.plan import Recipe, assemble, jobs
from kvstore.gpu_worker.promptcache.quality import Comparison, Forced, Sample
from kvstore.promptcache import Encoding, HuggingFaceTokenizer, Layout, Method, Tokenizer, parse_prompt

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
RECIPES = {
    "alone": Recipe(Method.ALONE),
    "alone, first 15 %": Recipe(Method.ALONE, 0.15),
    "alone, deviating 15 %": Recipe(Method.ALONE, deviating=0.15),
    "beginning": Recipe(),
    "beginning, first 5 %": Recipe(share=0.05),
    "beginning, first 15 %": Recipe(share=0.15),
    "beginning, deviating 5 %": Recipe(deviating=0.05),
    "beginning, deviating 10 %": Recipe(deviating=0.1),
    "beginning, deviating 15 %": Recipe(deviating=0.15),
    "beginning, deviating 20 %": Recipe(deviating=0.2),
    "beginning, first 5 % and deviating 10 %": Recipe(share=0.05, deviating=0.1),
    "beginning, first 5 % and deviating 15 %": Recipe(share=0.05, deviating=0.15),
    "beginning, see all": Recipe(see_later=True),
}
PASSAGES, ANSWER_TOKENS_MAX, PASSAGE_CHARACTERS_MAX = 4, 24, 600
MUSIQUE_CHARACTERS_MAX = 300
"""Of each of its ten passages."""
KL_GOAL, GROWTH_GOAL, KL_GOAL_20, GROWTH_GOAL_20 = 0.08, 0.025, 0.027, 0.012


def main() -> int:
    options = arguments(__doc__)
    options.add_argument("--data", type=Path, default=DATA, help="folder with longdoc/")
    options.add_argument("--questions", type=int, help="of each set (default: 12; quick: 1)")
    options.add_argument("--skip", type=int, default=0, help="so many questions of each set")
    options.add_argument(
        "--resume", type=Path, help="file that keeps each question's figures; what is there is not run"
    )
    options.add_argument(
        "--recipes", nargs="+", choices=tuple(RECIPES), metavar="NAME", help="by default all"
    )
    options.add_argument("--sets", nargs="+", choices=("NQ", "MuSiQue", "passkeys"), help="by default all")
    chosen = options.parse_args()
    count, skip = chosen.questions or (1 if chosen.quick else 12), chosen.skip
    wanted = chosen.sets or (("NQ",) if chosen.quick else ("NQ", "MuSiQue", "passkeys"))
    torch.set_num_threads(THREADS)
    print(heading(__file__), f"torch {torch.__version__}, {THREADS} threads", sep=", ", flush=True)
    sets = {
        "NQ": nq(chosen.data / "longdoc" / "litm_nq-open-oracle.jsonl.gz", skip + count),
        "MuSiQue": musique(chosen.data / "longdoc" / "cacheblend_musique_s.json.zst", skip + count),
        "passkeys": passkeys(skip + count),
    }
    sets = {name: samples[skip:] for name, samples in sets.items() if name in wanted}
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    if not READY:
        print(
            "left out: SmolLM2 is not there (make demo makes it ready), and what random weights say means nothing"
        )
        return finish(__file__, chosen, rows, goals)
    known = kept(chosen.resume)
    tokenizer = HuggingFaceTokenizer(AutoTokenizer.from_pretrained(READY[-1]))
    with store(384 << 20) as run_dir:
        engine = BatchEngine(
            smollm2(), lambda: connect(run_dir, timeout_s=30), pool_chunks=160, sequences_max=8
        )
        try:
            for name, samples in sets.items():
                if not samples:
                    print(f"{name}: left out, its file is not in {chosen.data}, or has no more")
                    continue
                begun = time.perf_counter()
                found = []
                for number, sample in enumerate(samples, skip):
                    figures = known.get((name, number))
                    if figures is None:
                        figures = compared(engine, tokenizer, sample, chosen.recipes or list(RECIPES))
                        keep(chosen.resume, name, number, figures)
                    found.append(figures)
                rows += summed(name, found)
                print(f"{name}: {len(samples)} questions, {time.perf_counter() - begun:.0f} s")
                print(*(told(row) for row in rows if row["set"] == name), sep="\n", flush=True)
        finally:
            engine.close()
    by = {(row["set"], row["recipe"]): row for row in rows}
    for recipe, kl, growth in (
        ("beginning", KL_GOAL, GROWTH_GOAL),
        ("beginning, deviating 20 %", KL_GOAL_20, GROWTH_GOAL_20),
    ):
        if (row := by.get(("NQ", recipe))) is not None:
            goals.append(Goal(f"NQ, {recipe}: KL", row["kl"], "nats", kl, "<="))
            goals.append(
                Goal(
                    f"NQ, {recipe}: growth of the perplexity", row["perplexity_growth"], "of 1", growth, "<="
                )
            )
    return finish(__file__, chosen, rows, goals, key=("set", "recipe"))


# ------------------------------------------------------------------------------------------------------------- texts


def nq(path: Path, count: int) -> list[Sample]:
    """Each question with the passage that has its answer, and with those of other questions, in any order."""
    if not path.exists():
        return []
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for _, line in zip(range(PASSAGES * count), file, strict=False)]
    chance = random.Random(0)
    passages = [titled(row["ctxs"][0], PASSAGE_CHARACTERS_MAX) for row in rows]
    samples = []
    for number in range(min(count, len(rows) // PASSAGES)):
        some = passages[number * PASSAGES : (number + 1) * PASSAGES]
        row = rows[number * PASSAGES]
        chance.shuffle(some)
        samples.append(Sample(tuple(some), row["question"], row["answers"][0]))
    return samples


def titled(passage: dict[str, str], most: int) -> str:
    return f"(Title: {passage['title']}) {passage['text'][:most]}"


def musique(path: Path, count: int) -> list[Sample]:
    if not path.exists() or not count:
        return []
    text = subprocess.run(["zstd", "-dc", path], capture_output=True, check=True).stdout
    found = []
    for row in json.loads(text)[:count]:
        some = tuple(titled(one, MUSIQUE_CHARACTERS_MAX) for one in row["ctxs"])
        found.append(Sample(some, row["question"], row["answers"][0]))
    return found


def passkeys(count: int) -> list[Sample]:
    chance = random.Random(1)
    found = []
    for number in range(count):
        filler = (
            "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 4
        )
        texts = [filler] * PASSAGES
        key = chance.randrange(10_000, 99_999)
        texts[number % PASSAGES] = f"{filler}The pass key is {key}. Remember it: {key} is the pass key. "
        found.append(Sample(tuple(texts), "What is the pass key?", f"The pass key is {key}"))
    return found


# --------------------------------------------------------------------------------------------------------- measuring


def compared(
    engine: BatchEngine, tokenizer: Tokenizer, sample: Sample, recipes: list[str]
) -> dict[str, tuple[Comparison, bool]]:
    """By recipe; and whether each token of the answer was the likeliest."""
    schema = sample.schema
    layout = Layout(schema, tokenizer, positions_max=engine.positions_max)
    placement = layout.place(parse_prompt(sample.prompt, schema))
    namespace = engine.namespace
    assert namespace is not None
    answer = list(tokenizer.encode(" " + sample.answer.strip()))[:ANSWER_TOKENS_MAX]
    plans: dict[str, Assembly] = {}
    for method in dict.fromkeys(RECIPES[name].method for name in recipes):
        encoding = Encoding(
            layout, namespace.salt, chunk_tokens=engine.pool.geometry.chunk_tokens, method=method
        )
        for job in jobs(encoding, salt=namespace.salt):
            encode(engine, job)
        for name in recipes:
            recipe = RECIPES[name]
            if recipe.method is method:
                plan = assemble(encoding, placement, salt=namespace.salt, moves=engine.moves, recipe=recipe)
                assert plan is not None
                plans[name] = plan
    assert engine.flush(60)
    assert not engine.save_counters["modules_dropped"], "a module found no room"
    whole = replace(next(iter(plans.values())), parts=(), recomputed=(), exact=0)
    read = {name: Forced(answer) for name in ("full", *plans)}
    numbers = {
        engine.add(plan.tokens, len(answer), assembly=plan, sampler=read[name]): name
        for name, plan in (("full", whole), *plans.items())
    }
    requests = {number: engine.request(number) for number in numbers}
    for _ in engine.run():
        pass
    found = {}
    for number, name in numbers.items():
        comparison = Comparison()
        comparison.add(read["full"].seen, read[name].seen, answer)
        stored = sum(part.count for part in requests[number].assembly.parts)  # type: ignore[union-attr]
        comparison.stored, comparison.computed = stored, stored - requests[number].reused.tokens
        right = all(int(seen.argmax()) == token for seen, token in zip(read[name].seen, answer, strict=True))
        found[name] = comparison, right
    return found


def keep(path: Path | None, name: str, number: int, figures: dict[str, tuple[Comparison, bool]]) -> None:
    if path is not None:
        line = {recipe: [asdict(comparison), right] for recipe, (comparison, right) in figures.items()}
        with path.open("a") as file:
            file.write(json.dumps([name, number, line]) + "\n")


def kept(path: Path | None) -> dict[tuple[str, int], dict[str, tuple[Comparison, bool]]]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (name, number): {recipe: (Comparison(**sums), right) for recipe, (sums, right) in line.items()}
        for name, number, line in lines
    }


def summed(name: str, found: list[dict[str, tuple[Comparison, bool]]]) -> Iterator[dict[str, Any]]:
    for recipe in (name for name in RECIPES if all(name in one for one in found)):
        total = Comparison()
        for one in found:
            each, _ = one[recipe]
            total.tokens += each.tokens
            total.kl += each.kl
            total.agreed += each.agreed
            total.nll += each.nll
            total.full_nll += each.full_nll
            total.stored += each.stored
            total.computed += each.computed
        # Passkeys and answers count only where full attention has them
        known = [one for one in found if one["full"][1]]
        right = sum(one[recipe][1] for one in known)
        yield (
            {"set": name, "recipe": recipe, "questions": len(found)}
            | total.row
            | {
                "exact": right,
                "exact_full": len(known),
            }
        )


def told(row: dict[str, Any]) -> str:
    return (
        f"  {row['recipe']:38} KL {row['kl']:.4f}  top-1 {row['agreement']:.3f}  perplexity {row['perplexity']:.3f} "
        f"({row['perplexity_growth']:+.2%} on {row['full_perplexity']:.3f})  exact {row['exact']} of "
        f"{row['exact_full']}  recomputed {row['recomputed_share']:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
