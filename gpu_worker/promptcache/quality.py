"""What modules cost in quality, measured with the very engine that serves: answers that are known are read token by
token, once over KV of modules and once with all of the prompt computed (full attention at the same positions).

A recipe passes if the divergence of its predictions (KL, nats a token) and the perplexity of the answers are within
bounds. The cheapest that passes is what the worker serves with; a model with none is refused unless it is forced.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from kvstore.errors import Unavailable
from kvstore.gpu_worker.promptcache.encoder import Encoder
from kvstore.gpu_worker.promptcache.plan import Recipe
from kvstore.gpu_worker.promptcache.prompts import Planned, Prompts
from kvstore.gpu_worker.promptcache.samples import SAMPLES
from kvstore.gpu_worker.sampling import GREEDY, Sampler, check_numbers
from kvstore.gpu_worker.serve.service import Ask, Service, StepFailed
from kvstore.promptcache import Schema, Tokenizer, parse_schema

KL_MAX = 0.08
PERPLEXITY_MAX = 0.025
"""By how much the perplexity may grow."""
RECIPES = (
    Recipe(),
    Recipe(share=0.05),
    Recipe(deviating=0.05),
    Recipe(deviating=0.1),
    Recipe(deviating=0.15),
    Recipe(deviating=0.2),
)
"""The cheapest first."""
BEGINNING = (
    "Write a high-quality answer for the given question using only the provided search results (some of which might be"
    " irrelevant).\n\n"
)
"""As in Lost in the Middle (arXiv 2307.03172), with documents that are numbered: what all modules attend to. Behind a
short line, and without numbers, the same passages diverge half as much again."""
SAMPLES_MAX = 256
ANSWER_TOKENS_MAX = 256


@dataclass(frozen=True, slots=True)
class Sample:
    """Documents, which become modules; a question about them; the answer, whose tokens are looked at."""

    documents: tuple[str, ...]
    question: str
    answer: str

    @classmethod
    def of(cls, row: Any) -> Sample:
        """Raises ValueError, naming what is missing."""
        if not isinstance(row, Mapping):
            raise ValueError("a text is an object with documents, question and answer")
        documents, question, answer = (row.get(name) for name in ("documents", "question", "answer"))
        if (
            not isinstance(documents, list)
            or not documents
            or not all(isinstance(d, str) and d for d in documents)
        ):
            raise ValueError("documents is a list of texts")
        if not isinstance(question, str) or not isinstance(answer, str) or not answer:
            raise ValueError("question and answer are texts")
        return cls(tuple(documents), question, answer)

    @property
    def schema(self) -> Schema:
        modules = "".join(
            f'<module name="d{number}" space="preserve">{_quoted(f"Document [{number + 1}] {text}")}</module>'
            for number, text in enumerate(self.documents)
        )
        return parse_schema(f'<schema name="sample" space="preserve">{BEGINNING}{modules}</schema>')

    @property
    def prompt(self) -> str:
        imports = "".join(f"<d{number}/>" for number in range(len(self.documents)))
        asked = f"\nQuestion: {_uncut(self.question)}\nAnswer:"
        return f'<prompt schema="sample" space="preserve">{imports}<![CDATA[{asked}]]></prompt>'


def _uncut(text: str) -> str:
    return text.replace("]]>", "]] >")


def _quoted(text: str) -> str:
    return f"<![CDATA[{_uncut(text)}\n]]>"


class Forced(Sampler):
    """Chooses tokens that are known, and keeps the logarithms of all probabilities before each."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(GREEDY)
        self._tokens = tokens
        self.seen: list[torch.Tensor] = []

    def choose(self, logits: torch.Tensor) -> int:
        check_numbers(logits)
        token = self._tokens[len(self.seen)]
        self.seen.append(torch.log_softmax(logits.float(), 0))
        return token


@dataclass(slots=True)
class Comparison:
    """Sums over tokens, of one recipe against full attention."""

    tokens: int = 0
    kl: float = 0.0
    agreed: int = 0
    nll: float = 0.0
    full_nll: float = 0.0
    computed: int = 0
    """Prompt tokens that were computed ..."""
    stored: int = 0
    """... although the store could have them: `stored` of them it could."""

    def add(self, full: Sequence[torch.Tensor], seen: Sequence[torch.Tensor], answer: Sequence[int]) -> None:
        for expected, found, token in zip(full, seen, answer, strict=True):
            self.tokens += 1
            self.kl += float((expected.exp() * (expected - found)).sum())
            self.agreed += int(expected.argmax() == found.argmax())
            self.nll -= float(found[token])
            self.full_nll -= float(expected[token])

    @property
    def row(self) -> dict[str, float]:
        count = max(1, self.tokens)
        return {
            "tokens": self.tokens,
            "kl": self.kl / count,
            "agreement": self.agreed / count,
            "perplexity": math.exp(self.nll / count),
            "full_perplexity": math.exp(self.full_nll / count),
            "perplexity_growth": math.exp((self.nll - self.full_nll) / count) - 1,
            "recomputed_share": self.computed / max(1, self.stored),
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """`recipe`: the cheapest that passed; None: none did. `rows`: what each measured one came to."""

    recipe: Recipe | None
    rows: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    forced: bool = False

    @property
    def body(self) -> dict[str, Any]:
        recipe = None
        if self.recipe is not None:
            recipe = asdict(self.recipe) | {
                "method": self.recipe.method.value,
                "computed": self.recipe.computed,
            }
        return {"recipe": recipe, "forced": self.forced, "rows": list(self.rows)}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a measurement is: it has read `samples_done` of `samples` with `recipe`, the `number`th of `recipes`. It
    ends with the first recipe that passes, so the last ones may never come."""

    recipe: str
    number: int
    recipes: int
    samples_done: int
    samples: int


class Fixed:
    """A library of one schema."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def versions(self, name: str) -> Sequence[Schema]:
        return (self._schema,) if name == self._schema.name else ()


async def compare(
    service: Service,
    encoder: Encoder,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    recipe: Recipe,
    full: dict[Sample, list[torch.Tensor]],
    in_words: Callable[[Callable[[], Planned]], Awaitable[Planned]],
    begins: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """One recipe over all samples. `full`: what full attention says, filled as it is needed. `begins` hears the number
    of each sample before it is read. Modules that are not in the store are encoded first. Raises ValueError for
    what the engine cannot hold, StepFailed where the model fails or the store does not take the modules."""
    found = Comparison()
    for number, sample in enumerate(samples):
        begins(number)
        prompts = Prompts(service.engine, tokenizer, Fixed(sample.schema))
        planned = await in_words(lambda: prompts.plan(sample.prompt, recipe))  # noqa: B023
        answer = list(tokenizer.encode(" " + sample.answer.strip()))[:ANSWER_TOKENS_MAX]
        if planned.assembly is None or not answer:
            continue
        for job in planned.wanted:
            await encoder.encode(job)
        await encoder.flush()
        if sample not in full:
            whole = replace(planned.assembly, parts=(), recomputed=(), exact=0)
            full[sample] = (await _read(service, planned, whole, answer)).seen
        forced = await _read(service, planned, planned.assembly, answer, found)
        found.add(full[sample], forced.seen, answer)
    return found


async def _read(
    service: Service,
    planned: Planned,
    assembly: Any,
    answer: Sequence[int],
    into: Comparison | None = None,
) -> Forced:
    forced = Forced(answer)
    ask = Ask(tokens=planned.tokens, max_new_tokens=len(answer), assembly=assembly, sampler=forced)
    job = await service.submit(ask)
    try:
        async with aclosing(job.outputs()) as outputs:
            async for output in outputs:
                if output.finish == "error":
                    raise StepFailed("the model's logits are no numbers")
    finally:
        service.abort(job)
    if into is not None:
        loaded = job.request.reused.tokens
        if assembly.parts and not loaded:
            raise StepFailed("the store did not have the modules that were just encoded: is it full?")
        there = sum(part.count for part in assembly.parts)
        into.stored += there
        into.computed += max(0, there - loaded)
    return forced


async def verify(
    service: Service,
    encoder: Encoder,
    tokenizer: Tokenizer,
    in_words: Callable[[Callable[[], Planned]], Awaitable[Planned]],
    *,
    samples: Sequence[Sample] = (),
    kl_max: float = KL_MAX,
    perplexity_max: float = PERPLEXITY_MAX,
    tell: Callable[[Progress], None] = lambda _: None,
) -> Verdict:
    """Measures recipes, the cheapest first, up to the first that passes; `tell` hears how far it is. Raises
    Unavailable without a store."""
    if service.engine.namespace is None:
        raise Unavailable(
            "there is no daemon, or nothing of this model may be stored", remedy="see GET /health"
        )
    samples = samples or [Sample.of(row) for row in SAMPLES]
    full: dict[Sample, list[torch.Tensor]] = {}
    rows: list[dict[str, Any]] = []
    for number, recipe in enumerate(RECIPES, 1):
        comparison = await compare(
            service,
            encoder,
            tokenizer,
            samples,
            recipe,
            full,
            in_words,
            lambda done: tell(Progress(str(recipe), number, len(RECIPES), done, len(samples))),  # noqa: B023
        )
        row = comparison.row
        passed = bool(comparison.tokens) and (
            row["kl"] <= kl_max and row["perplexity_growth"] <= perplexity_max
        )
        how = {"method": recipe.method.value, "share": recipe.share, "deviating": recipe.deviating}
        rows.append({**how, "passed": passed} | row)
        if passed:
            return Verdict(recipe, tuple(rows))
    return Verdict(None, tuple(rows))
