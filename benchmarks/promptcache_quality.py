"""What modules cost in quality: predictions over KV of modules, against full attention, with the engine that serves.

Questions with passages of two public sets (NaturalQuestions, MuSiQue: `longdoc/` of the data folder, `--data`; by
default ../shared/data), each passage a module; the answer's tokens are read one by one, and then the model answers
itself. Of "NQ, sentences" the whole sentence of the passage with the answer is read. SmolLM2-135M in float32; prompts
of at most 2,048 tokens.

    KL            of the predictions, nats a token          top-1     how often the likeliest token is the same
    perplexity    of the answers, and by how much it grows  F1, EM    of the model's own first line against all answers
    exact         answers (passkeys: numbers) whose tokens are all the likeliest, of those of which full attention's are

    alone         each module encoded after nothing, as in the paper
    beginning     after the text with which every prompt of the schema begins
    first N %     the first tokens of each module computed in place; `alone, first 15 %` is as EPIC's LegoLink (arXiv
                  2410.15332), made by us
    deviating N % of all modules, the tokens computed in place whose KV differs most from full attention in the second
                  layer; `alone, deviating 15 %` is as CacheBlend-15 (arXiv 2405.16444), made by us
    see all       arguments and text attend to all modules, those behind them included: the paper's pass

A run takes minutes: `--resume FILE` goes on where one that was stopped had come to; `--seconds` stops it there.

    make bench-promptcache_quality ARGS='--quick --json'
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import string
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arguments, finish, heading, some
from promptcache import THREADS, encode, store
from shared_prefix import READY, smollm2

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvstore.client import connect
from kvstore.gpu_worker.assembly import Assembly
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.promptcache.plan import Recipe, assemble, jobs
from kvstore.gpu_worker.promptcache.quality import Comparison, Forced, Sample
from kvstore.promptcache import Encoding, HuggingFaceTokenizer, Layout, Method, Schema, parse_prompt

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
SCORED = ("full", "beginning", "beginning, deviating 20 %")
"""What answers itself, too: to compute what deviates once more takes as long as the question."""
PASSAGES, ANSWER_TOKENS_MAX, SAID_TOKENS_MAX, PROMPT_TOKENS_MAX = 4, 48, 16, 2048
PART_CHARACTERS = 1000
"""Of a passage of MuSiQue, which has some 600 tokens."""
SCORE_GOAL = 1.0
"""Points of a hundred that F1 and exact match may lose."""
KL_GOAL, GROWTH_GOAL, KL_GOAL_20, GROWTH_GOAL_20 = 0.08, 0.025, 0.027, 0.012


QUICK = ("alone", "beginning", "beginning, first 15 %", "beginning, deviating 20 %")


@dataclass(frozen=True)
class Question(Sample):
    """`answers`: all that are right. `given`: how the answer begins, which is read and not judged. `scored`: the model
    answers itself, too."""

    answers: tuple[str, ...] = ()
    given: str = ""
    scored: bool = True


@dataclass(slots=True)
class Figures:
    """Of one question and recipe. `exact`: each judged token of the answer was the likeliest. `f1`, `em`: of what the
    model said itself, 0 to 1."""

    comparison: Comparison
    exact: bool
    f1: float | None = None
    em: float | None = None


Found = dict[str, Figures]
"""By recipe, "full" among them."""


def main() -> int:
    options = arguments(__doc__)
    options.add_argument("--data", type=Path, default=DATA, help="folder with longdoc/")
    options.add_argument("--questions", type=some, help="of each set (default: 40; quick: 1)")
    options.add_argument("--skip", type=int, default=0, help="so many questions of each set")
    options.add_argument(
        "--resume", type=Path, help="file that keeps each question's figures; what is there is not run"
    )
    options.add_argument(
        "--seconds", type=float, help="begin no question after so many; what is there is summed up"
    )
    options.add_argument(
        "--recipes", nargs="+", choices=tuple(RECIPES), metavar="NAME", help="by default all"
    )
    options.add_argument("--sets", nargs="+", choices=tuple(QUESTIONS), help="by default all")
    chosen = options.parse_args()
    count, skip = chosen.questions or (1 if chosen.quick else 40), chosen.skip
    wanted = chosen.sets or (("NQ",) if chosen.quick else QUESTIONS)
    recipes = chosen.recipes or list(QUICK if chosen.quick else RECIPES)
    torch.set_num_threads(THREADS)
    print(heading(__file__), f"torch {torch.__version__}, {THREADS} threads", sep=", ", flush=True)
    rows: list[dict[str, Any]] = []
    goals: list[Goal] = []
    if not READY:
        print(
            "left out: SmolLM2 is not there (make demo makes it ready), and what random weights say means nothing"
        )
        return finish(__file__, chosen, rows, goals)
    begun = time.monotonic()
    known = kept(chosen.resume)
    with ExitStack() as stack:
        ask: Asker | None = None
        for name in wanted:
            questions = QUESTIONS[name](chosen.data / "longdoc", skip + count)[skip:]
            if not questions:
                print(f"{name}: left out, its file is not in {chosen.data}, or has no more")
                continue
            found = []
            for number, question in enumerate(questions, skip):
                figures = known.get((name, number))
                if figures is None:
                    if chosen.seconds is not None and time.monotonic() - begun > chosen.seconds:
                        break
                    ask = ask or stack.enter_context(asker())
                    figures = ask(question, recipes)
                    keep(chosen.resume, name, number, figures)
                found.append(figures)
            if found:
                rows += summed(name, found)
                print(f"{name}: {len(found)} questions, {time.monotonic() - begun:.0f} s since the beginning")
                print(*(told(row) for row in rows if row["set"] == name), sep="\n", flush=True)
    goals += list(goals_of(rows))
    return finish(__file__, chosen, rows, goals, key=("set", "recipe"))


def goals_of(rows: list[dict[str, Any]]) -> Iterator[Goal]:
    by = {(row["set"], row["recipe"]): row for row in rows}
    for name in ("NQ", "NQ, sentences", "MuSiQue"):
        for recipe, kl, growth in (
            ("beginning", KL_GOAL, GROWTH_GOAL),
            ("beginning, deviating 20 %", KL_GOAL_20, GROWTH_GOAL_20),
        ):
            row, full = by.get((name, recipe)), by.get((name, "full"))
            if row is None or full is None:
                continue
            grown = row["perplexity_growth"]
            yield Goal(f"{name}, {recipe}: KL", row["kl"], "nats", kl, "<=")
            yield Goal(f"{name}, {recipe}: growth of the perplexity", grown, "of 1", growth, "<=")
            scored = row["f1"] is not None and row["questions"] == full["questions"]
            for score in ("f1", "em") if scored else ():
                lost = full[score] - row[score]
                yield Goal(f"{name}, {recipe}: {score.upper()} lost", lost, "points", SCORE_GOAL, "<=")


# ------------------------------------------------------------------------------------------------------------- texts


def nq(folder: Path, count: int) -> list[Question]:
    """Four questions each with the passages that have their answers, in any order."""
    path = folder / "litm_nq-open-oracle.jsonl.gz"
    if not path.exists():
        return []
    with gzip.open(path, "rt") as file:
        rows = [json.loads(line) for _, line in zip(range(2 * count + PASSAGES), file, strict=False)]
    chance = random.Random(0)
    found = []
    for number in range(0, len(rows) - PASSAGES + 1, PASSAGES):
        some = rows[number : number + PASSAGES]
        passages = [titled(row["ctxs"][0]) for row in some]
        chance.shuffle(passages)
        for row in some:
            if answer := answer_in(row["ctxs"][0]["text"], row["answers"]):
                found.append(Question(tuple(passages), row["question"], answer, tuple(row["answers"])))
    return found[:count]


def sentences(folder: Path, count: int) -> list[Question]:
    """The same questions; read is the sentence of the passage with the answer: more tokens of each, which a small
    model expects once it has found the passage."""
    found = []
    for question in nq(folder, count):
        text = next(text for text in map(untitled, question.documents) if question.answer in text)
        at = text.index(question.answer)
        begin = text.rfind(". ", 0, at)
        end = text.find(". ", at + len(question.answer))
        sentence = text[begin + 2 if begin >= 0 else 0 : end + 1 if end >= 0 else None]
        found.append(replace(question, answer=sentence, scored=False))
    return found


def musique(folder: Path, count: int) -> list[Question]:
    """Each question with a part of a passage in which its answer stands, and of other passages of its."""
    path = folder / "cacheblend_musique_s.json.zst"
    if not path.exists() or not count:
        return []
    text = subprocess.run(["zstd", "-dc", path], capture_output=True, check=True).stdout
    chance = random.Random(0)
    found: list[Question] = []
    for row in json.loads(text):
        gold = next((one for one in row["ctxs"] if answer_in(one["text"], row["answers"])), None)
        if gold is None or len(found) == count:
            continue
        answer = answer_in(gold["text"], row["answers"])
        others = chance.sample([one for one in row["ctxs"] if one is not gold], PASSAGES - 1)
        passages = [titled({**one, "text": around(one["text"], answer)}) for one in (gold, *others)]
        chance.shuffle(passages)
        found.append(Question(tuple(passages), row["question"], answer, tuple(row["answers"])))
    return found


def answer_in(text: str, answers: Sequence[str]) -> str:
    """The first of these that the text has, as that writes it; "" without."""
    places = ((text.lower().find(answer.lower()), len(answer)) for answer in answers)
    return next((text[at : at + size] for at, size in places if at >= 0), "")


def around(text: str, answer: str) -> str:
    """A part of it, of whole words, with the answer if there is one."""
    begin = max(0, text.find(answer) - PART_CHARACTERS // 2)
    part = text[begin : begin + PART_CHARACTERS]
    return (part.partition(" ")[2] if begin else part).rpartition(" ")[0]


def titled(passage: dict[str, str]) -> str:
    return f"(Title: {passage['title']}) {passage['text']}" if passage["title"] else passage["text"]


def untitled(passage: str) -> str:
    return passage.partition(") ")[2] if passage.startswith("(Title: ") else passage


def passkeys(folder: Path, count: int) -> list[Question]:
    chance = random.Random(1)
    filler = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. " * 4
    found = []
    for number in range(count):
        texts = [filler] * PASSAGES
        key = chance.randrange(10_000, 99_999)
        texts[number % PASSAGES] = f"{filler}The pass key is {key}. Remember it: {key} is the pass key. "
        found.append(
            Question(tuple(texts), "What is the pass key?", str(key), (str(key),), given="The pass key is")
        )
    return found


QUESTIONS = {"NQ": nq, "NQ, sentences": sentences, "MuSiQue": musique, "passkeys": passkeys}


# --------------------------------------------------------------------------------------------------------- measuring


@contextmanager
def asker() -> Iterator[Asker]:
    tokenizer = AutoTokenizer.from_pretrained(READY[-1])
    with store(512 << 20) as run_dir:
        engine = BatchEngine(
            smollm2(), lambda: connect(run_dir, timeout_s=30), pool_chunks=224, sequences_max=6
        )
        try:
            yield Asker(engine, tokenizer)
        finally:
            engine.close()


class Asker:
    def __init__(self, engine: BatchEngine, tokenizer: PreTrainedTokenizerFast) -> None:
        self._engine = engine
        self._hub = tokenizer
        self._tokenizer = HuggingFaceTokenizer(tokenizer)
        self._documents: tuple[str, ...] = ()
        """Of the question before: what is in the pool of its prompts goes on to serve."""
        self._encodings: dict[Method, Encoding] = {}

    def __call__(self, question: Question, recipes: Sequence[str]) -> Found:
        encode_text = self._tokenizer.encode
        given = encode_text(" " + question.given) if question.given else ()
        answer = [*given, *encode_text(" " + question.answer.strip())][:ANSWER_TOKENS_MAX]
        plans = self._plans(question, recipes)
        whole = replace(next(iter(plans.values())), parts=(), recomputed=(), exact=0, deviating=0.0)
        plans = {"full": whole} | plans
        read = {name: Forced(answer) for name in plans}
        numbers = {
            name: self._engine.add(plan.tokens, len(answer), assembly=plan, sampler=read[name])
            for name, plan in plans.items()
        }
        requests = {name: self._engine.request(number) for name, number in numbers.items()}
        for _ in self._engine.run():
            pass
        scores = self._scores(plans, question)
        found = {}
        for name, request in requests.items():
            comparison = Comparison()
            comparison.add(read["full"].seen, read[name].seen, answer)
            assert request.assembly is not None
            comparison.stored = sum(part.count for part in request.assembly.parts)
            comparison.computed = max(0, comparison.stored - request.reused.tokens)
            judged = list(zip(read[name].seen, answer, strict=True))[len(given) :]
            exact = all(int(seen.argmax()) == token for seen, token in judged)
            found[name] = Figures(comparison, exact, *scores.get(name, (None, None)))
        return found

    def _plans(self, question: Question, recipes: Sequence[str]) -> dict[str, Assembly]:
        engine, namespace = self._engine, self._engine.namespace
        assert namespace is not None
        question = self._fitting(question)
        if question.documents != self._documents:
            self._documents, self._encodings = question.documents, {}
            engine.pool.forget()
        plans: dict[str, Assembly] = {}
        for method in dict.fromkeys(RECIPES[name].method for name in recipes):
            encoding = self._encodings.get(method)
            if encoding is None:
                encoding = self._encodings[method] = self._encoded(question.schema, method, namespace.salt)
            schema = encoding.layout.schema
            placement = encoding.layout.place(parse_prompt(question.prompt, schema))
            for name in (name for name in recipes if RECIPES[name].method is method):
                plan = assemble(
                    encoding, placement, salt=namespace.salt, moves=engine.moves, recipe=RECIPES[name]
                )
                assert plan is not None
                plans[name] = plan
        return {name: plans[name] for name in recipes}

    def _encoded(self, schema: Schema, method: Method, salt: bytes) -> Encoding:
        engine = self._engine
        layout = Layout(schema, self._tokenizer, positions_max=engine.positions_max)
        size = engine.pool.geometry.chunk_tokens
        encoding = Encoding(layout, salt, chunk_tokens=size, method=method)
        for job in jobs(encoding, salt=salt):
            encode(engine, job)
        assert engine.flush(60)
        assert not engine.save_counters["modules_dropped"], "a module found no room"
        return encoding

    def _fitting(self, question: Question) -> Question:
        """The longest passages end earlier where the prompt would be too long."""
        sizes = [len(self._tokenizer.encode(text)) for text in question.documents]
        room = PROMPT_TOKENS_MAX - 96 - 8 * len(sizes) - len(self._tokenizer.encode(question.question))
        most = max(sizes)
        while sum(min(size, most) for size in sizes) > room:
            most -= 1
        documents = [
            text if size <= most else text[: len(text) * most // size].rpartition(" ")[0]
            for text, size in zip(question.documents, sizes, strict=True)
        ]
        return replace(question, documents=tuple(documents))

    def _scores(self, plans: dict[str, Assembly], question: Question) -> dict[str, tuple[float, float]]:
        ends = [*self._tokenizer.encode("\n"), self._hub.eos_token_id]
        said: dict[int, list[int]] = {}
        numbers = {
            name: self._engine.add(plan.tokens, SAID_TOKENS_MAX, assembly=plan, stop_tokens=ends)
            for name, plan in plans.items()
            if name in SCORED and question.scored
        }
        for output in self._engine.run():
            said.setdefault(output.request, []).append(output.token)
        texts = {
            name: self._hub.decode(said[number], skip_special_tokens=True) for name, number in numbers.items()
        }
        return {
            name: scored(text.strip().partition("\n")[0], question.answers) for name, text in texts.items()
        }


def scored(said: str, answers: Sequence[str]) -> tuple[float, float]:
    """F1 of words and exact match, of the answer that fits best, as SQuAD has them."""
    best_f1 = best_em = 0.0
    words = normal(said)
    for answer in answers:
        expected = normal(answer)
        common = sum((Counter(words) & Counter(expected)).values())
        best_f1 = max(best_f1, 2 * common / max(1, len(words) + len(expected)))
        best_em = max(best_em, float(words == expected))
    return best_f1, best_em


def normal(text: str) -> list[str]:
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", letters).split()


def keep(path: Path | None, name: str, number: int, found: Found) -> None:
    if path is not None:
        line = {recipe: asdict(figures) for recipe, figures in found.items()}
        with path.open("a") as file:
            file.write(json.dumps([name, number, line]) + "\n")


def kept(path: Path | None) -> dict[tuple[str, int], Found]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (name, number): {
            recipe: Figures(**{**row, "comparison": Comparison(**row["comparison"])})
            for recipe, row in line.items()
        }
        for name, number, line in lines
    }


def summed(name: str, found: list[Found]) -> Iterator[dict[str, Any]]:
    questions = found
    for recipe in ("full", *RECIPES):
        found = [each for each in questions if recipe in each]
        if not found:
            continue
        total = Comparison()
        for figures in (each[recipe] for each in found):
            for field in fields(Comparison):
                added = getattr(total, field.name) + getattr(figures.comparison, field.name)
                setattr(total, field.name, added)
        # Passkeys and answers count only where full attention has them
        known = [each for each in found if each["full"].exact]
        means = sorted(each[recipe].comparison.row["kl"] for each in found)
        scores: dict[str, float | None] = dict.fromkeys(("f1", "em"))
        if all(each[recipe].f1 is not None for each in found):
            scores = {
                score: 100 * sum(getattr(each[recipe], score) for each in found) / len(found)
                for score in scores
            }
        yield (
            {"set": name, "recipe": recipe, "questions": len(found)}
            | total.row
            | scores
            | {
                "kl_median": means[len(means) // 2],
                "exact": sum(each[recipe].exact for each in known),
                "exact_full": len(known),
            }
        )


def told(row: dict[str, Any]) -> str:
    scored = "" if row["f1"] is None else f"F1 {row['f1']:.1f}  EM {row['em']:.1f}  "
    return (
        f"  {row['recipe']:40} KL {row['kl']:.4f} (median {row['kl_median']:.4f})  top-1 {row['agreement']:.3f}  "
        f"perplexity {row['perplexity']:.3f} ({row['perplexity_growth']:+.2%})  {scored}"
        f"exact {row['exact']} of {row['exact_full']}  recomputed {row['recomputed_share']:.1%}"
    )


if __name__ == "__main__":
    sys.exit(main())
