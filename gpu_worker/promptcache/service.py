"""Prompt Cache of one worker: how prompts of modules are served, and whether."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvstore.gpu_worker.promptcache.ahead import Ahead
from kvstore.gpu_worker.promptcache.encoder import Encoder
from kvstore.gpu_worker.promptcache.plan import Recipe
from kvstore.gpu_worker.promptcache.prompts import DaemonLibrary, Library, Planned, Prompts
from kvstore.gpu_worker.promptcache.quality import KL_MAX, PERPLEXITY_MAX, Progress, Sample, Verdict, verify
from kvstore.gpu_worker.serve.service import Job, Service
from kvstore.keys import ROOT
from kvstore.promptcache import Method, Tokenizer
from kvstore.types import ChunkKey

log = logging.getLogger(__name__)


class PromptCache:
    """Belongs to the event loop, but for what `prompts` plans."""

    def __init__(
        self,
        service: Service,
        tokenizer: Tokenizer,
        library: Library,
        *,
        forced: bool = False,
        verdict_file: Path | None = None,
    ) -> None:
        """`forced`: serve without a verdict. `verdict_file`: keeps it from one worker to the next, for the weights that
        it was found with."""
        self.prompts = Prompts(service.engine, tokenizer, library)
        self.encoder = Encoder(service)
        self.ahead = Ahead(lambda: service.engine.namespace, service.is_live)
        self._service = service
        self._tokenizer = tokenizer
        self._library = library
        self._forced = forced
        self._file = verdict_file
        self._verdict = self._read()
        self._measured_with = self._weights
        self._measuring: Progress | None = None

    @property
    def verdict(self) -> Verdict | None:
        """None where nobody has measured, or what was measured had other weights."""
        return self._verdict if self._measured_with == self._weights else None

    @property
    def recipe(self) -> Recipe | None:
        """How prompts are served; None: they are not."""
        verdict = self.verdict
        if verdict is not None and verdict.recipe is not None:
            return verdict.recipe
        return Recipe() if self._forced or (verdict is not None and verdict.forced) else None

    @property
    def refusal(self) -> str:
        """Why prompts of modules are not served, and what to do."""
        if self.verdict is None:
            return "what modules cost this model in quality was not measured: run kvctl promptcache verify --worker URL"
        return (
            "modules cost this model more quality than they may: see GET /promptcache; kvctl promptcache verify "
            "--kl-max and --perplexity-max allow more, --force whatever it is"
        )

    @property
    def status(self) -> dict[str, Any]:
        recipe = self.recipe
        return {
            "served": str(recipe) if recipe is not None else "",
            "refusal": "" if recipe is not None else self.refusal,
            "verdict": self.verdict.body if self.verdict is not None else None,
            "encoded": self.encoder.encoded,
            "failed": self.encoder.failed,
            "waiting": self.encoder.left,
            "measuring": asdict(self._measuring) if self._measuring is not None else None,
        }

    def start(self) -> None:
        self.encoder.start()
        self.ahead.start()

    async def close(self) -> None:
        await self.ahead.close()
        await self.encoder.close()
        if isinstance(self._library, DaemonLibrary):
            self._library.close()

    def served(self, planned: Planned, job: Job, root: ChunkKey = ROOT) -> None:
        """Its first token is there: what it had to compute is encoded, for the next one."""
        self.ahead.left(job)
        found = job.request.found
        if planned.assembly is None:
            return
        if job.request.absent is not None:
            self.encoder.want(planned.missing(job.request.absent), root)
            return
        asked = found is not None and found.lease is not None
        here = frozenset(part.key for part in planned.assembly.parts if part.end <= job.request.reused.hbm)
        missing = found.missing if asked and found is not None else None
        if missing is None and not any(part.key not in here for part in planned.assembly.parts):
            return
        self.encoder.want(planned.missing(missing), root)

    async def verify(
        self,
        off_the_loop: Callable[[Callable[[], Planned]], Awaitable[Planned]],
        samples: Sequence[Sample] = (),
        *,
        kl_max: float = KL_MAX,
        perplexity_max: float = PERPLEXITY_MAX,
        force: bool = False,
    ) -> Verdict:
        """Measures, and serves by what comes of it from now on. Raises what `quality.verify` raises."""
        weights = self._weights
        try:
            found = await verify(
                self._service,
                self.encoder,
                self._tokenizer,
                off_the_loop,
                samples=samples,
                kl_max=kl_max,
                perplexity_max=perplexity_max,
                tell=self._measures,
            )
        finally:
            self._measuring = None
        self._verdict, self._measured_with = Verdict(found.recipe, found.rows, forced=force), weights
        self._keep()
        return self._verdict

    def _measures(self, progress: Progress) -> None:
        self._measuring = progress

    @property
    def _weights(self) -> str:
        """What the verdict belongs to."""
        return self._service.engine.weights.hex()

    def _read(self) -> Verdict | None:
        if self._file is None or not self._file.exists():
            return None
        try:
            kept = json.loads(self._file.read_text())
            if kept["weights"] != self._weights:
                return None
            recipe = kept["recipe"]
            return Verdict(
                None
                if recipe is None
                else Recipe(
                    Method(recipe["method"]),
                    share=recipe["share"],
                    deviating=recipe.get("deviating", 0.0),  # files of earlier versions have none
                    see_later=recipe["see_later"],
                ),
                tuple(kept["rows"]),
                forced=bool(kept["forced"]),
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is no verdict, and is not used: %s", self._file, error)
            return None

    def _keep(self) -> None:
        if self._file is None or self._verdict is None:
            return
        part = self._file.with_name(self._file.name + ".part")
        try:
            part.write_text(json.dumps({"weights": self._measured_with, **self._verdict.body}))
            part.replace(self._file)
        except OSError as error:
            log.warning("the verdict is not kept: %s", error)


def served_as(planned: Planned) -> dict[str, Any]:
    """What an answer says of its prompt."""
    return {
        "schema": planned.schema,
        "version": planned.version.hex(),
        "stale": planned.stale,
        "prompt_tokens": len(planned.tokens),
        "stored_tokens": planned.stored,
        "reply_at": planned.end,
    }
