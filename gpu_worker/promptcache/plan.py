"""From the positions of a prompt to what the engine is asked: pure, no model and no store.

Placement + Encoding ──assemble──▶ Assembly    a prompt: parts that are loaded, tokens that are computed
Unit ──encode──▶ Assembly                      a module's KV: computed after what it attends to, and kept
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.gpu_worker.assembly import Assembly, Kept, Part
from kvstore.keys import ROOT
from kvstore.promptcache.encoding import Chunk, Encoding, Entry, Method, Unit
from kvstore.promptcache.layout import Placement, Run, Source
from kvstore.promptcache.schema import Path
from kvstore.types import SESSION_NAME_BYTES_MAX, ChunkKey

OWNER_PREFIX = "promptcache:"
"""What the names of sessions that own modules begin with."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How prompts are served. The defaults are the cheapest: nothing is computed that the store has.

    `method`: what modules are encoded after. `share`: of each module, so many of its tokens are computed in place
    although the store has them (0 to 1), the first ones, which attended to least of what stands before them now (EPIC,
    arXiv 2410.15332). `deviating`: of all modules together, this share more, those whose KV differs most from what full
    attention gives in the second layer (CacheBlend, arXiv 2405.16444); to know that, the first layer is computed of all
    tokens. `see_later`: arguments and text attend to all modules, those behind them included (the paper's
    pass, section 3.4), and not to smaller positions alone.
    """

    method: Method = Method.BEGINNING
    share: float = 0.0
    deviating: float = 0.0
    see_later: bool = False

    def __post_init__(self) -> None:
        for name in ("share", "deviating"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} is {value}: must be from 0 to 1")

    def __str__(self) -> str:
        later = ", later modules are seen" if self.see_later else ""
        return f"{self.method.value}, {self.computed} computed in place{later}"

    @property
    def computed(self) -> str:
        """Which of the modules' tokens are."""
        first = f"the first {self.share:.0%} of each module" if self.share else ""
        most = f"the {self.deviating:.0%} that deviate most" if self.deviating else ""
        return " and ".join(part for part in (first, most) if part) or "nothing"


@dataclass(slots=True)
class _Block:
    """Tokens at consecutive positions, stored in one chunk or computed."""

    tokens: Sequence[int]
    position: int
    entry: Entry | None = None
    computed: int = 0
    """So many of its first tokens, although they are stored."""


def assemble(
    encoding: Encoding, placement: Placement, *, salt: bytes, moves: bool, recipe: Recipe
) -> Assembly | None:
    """What the engine computes of a prompt and loads of it; None for a prompt like any other, whose KV is exact.

    `salt`: of the namespace. `moves`: whether keys can be loaded to other positions; else what moved is computed."""
    blocks: list[_Block] = []
    found = encoding.entries(placement)
    stored = iter(found)
    sizes: Counter[Path] = Counter()
    for run, entries in found:
        sizes[run.path] += sum(len(entry.chunk.tokens) for entry in entries if not entry.exact)
    left = {path: math.ceil(recipe.share * size) for path, size in sizes.items()}
    """Tokens of each module that are computed in place yet."""
    approximate = False
    for run in placement.runs:
        entries = next(stored)[1] if run.source is Source.STORED else ()
        if not entries:
            blocks.append(_Block(run.tokens, run.position))
            continue
        at = run.position
        for entry in entries:
            count = len(entry.chunk.tokens)
            block = _Block(entry.chunk.tokens, at, entry if moves or not entry.delta else None)
            if not entry.exact:
                approximate = True
                block.computed = min(left[run.path], count)
                left[run.path] -= block.computed
            blocks.append(block)
            at += count
    positions = [at for block in blocks for at in range(block.position, block.position + len(block.tokens))]
    if not approximate and positions == list(range(len(positions))):
        return None
    if recipe.see_later:
        blocks.sort(key=lambda block: block.entry is None)
        positions = [
            at for block in blocks for at in range(block.position, block.position + len(block.tokens))
        ]
    parts: list[Part] = []
    recomputed: list[tuple[int, int]] = []
    first = exact = 0
    for block in blocks:
        end = first + len(block.tokens)
        if block.entry is not None:
            parts.append(Part(block.entry.chunk.key, first, len(block.tokens), block.entry.delta))
            if block.entry.exact and exact == first:
                exact = end
        if block.computed:
            recomputed.append((first, first + block.computed))
        first = end
    # In one piece from the beginning on: as chunks of the prompt's own, it has the bits of full attention
    reach = parts[-1].end if parts else 0
    gapless = sum(part.count for part in parts) == reach and positions[:reach] == list(range(reach))
    in_one_piece = gapless and not any(part.delta for part in parts)
    return Assembly(
        tuple(token for block in blocks for token in block.tokens),
        tuple(positions),
        placement.end,
        tuple(parts),
        tuple(recomputed),
        recipe.deviating,
        exact,
        salt=salt,
        by_part=not recipe.deviating and not (in_one_piece and _encoded_together(encoding, found)),
    )


def _encoded_together(encoding: Encoding, found: Sequence[tuple[Run, Sequence[Entry]]]) -> bool:
    """Whether what is not exact of a prompt is one module, or one scaffold."""
    paths = {run.path for run, entries in found if not all(entry.exact for entry in entries)}
    used = {run.path for run, _ in found}
    return len(paths) <= 1 or any(
        paths <= {*unit.paths} and used.issuperset(unit.paths) for unit in encoding.scaffolds
    )


# --------------------------------------------------------------------------------------------------------- encoding


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Something to be encoded, known by the first of its keys."""

    key: ChunkKey
    keys: tuple[ChunkKey, ...] = field(repr=False)
    name: str
    assembly: Assembly = field(repr=False)


def jobs(encoding: Encoding, *, salt: bytes, root: ChunkKey = ROOT) -> Iterator[Job]:
    """All that a schema's prompts can have in the store: first the beginning, which the others attend to."""
    method = encoding.method.value
    name = encoding.layout.schema.name
    if encoding.beginning:
        yield _job(name, "", (), encoding.beginning, salt, root)
    for path, unit in encoding.units.items():
        if unit.keys:
            yield _job(name, f"{'/'.join(path) or '.'} {method}", unit.after, unit.pieces, salt, root)
    for unit in encoding.scaffolds:
        if unit.keys:
            yield _job(name, f"{_members(unit)} {method}", unit.after, unit.pieces, salt, root)


def document_jobs(
    encoding: Encoding, placement: Placement, *, salt: bytes, root: ChunkKey = ROOT
) -> Iterator[Job]:
    """Of a prompt's documents. Each is owned by a session that has its text's digest in its name: prompts of any order
    have it in common."""
    name = encoding.layout.schema.name
    for run in placement.runs:
        if run.document:
            unit = encoding.document(run)
            collection = "/".join(run.path).rpartition("[")[0]
            what = f"{collection}#{unit.content.hex()[:32]} {encoding.method.value}"
            yield _job(name, what, unit.after, unit.pieces, salt, root)


def _members(unit: Unit) -> str:
    return "+".join("/".join(path) for path in unit.paths)


def _job(
    schema: str, what: str, after: Sequence[Chunk], pieces: Sequence[Chunk], salt: bytes, root: ChunkKey
) -> Job:
    tokens: list[int] = []
    positions: list[int] = []
    parts: list[Part] = []
    kept: list[Kept] = []
    parent = ROOT
    for chunk in (*after, *pieces):
        first, count = len(tokens), len(chunk.tokens)
        tokens += chunk.tokens
        positions += range(chunk.position, chunk.position + count)
        if not chunk.key:
            continue  # placeholders
        if len(parts) < len(after):
            parts.append(Part(chunk.key, first, count))
        else:
            kept.append(Kept(chunk.key, parent, first, count, chunk.position, chunk.exact))
        parent = chunk.key
    exact = sum(len(chunk.tokens) for chunk in (*after, *pieces) if chunk.exact)
    assembly = Assembly(
        tuple(tokens),
        tuple(positions),
        positions[-1] + 1,
        tuple(parts),
        exact=exact,
        kept=tuple(kept),
        owner=owner_name(schema, what, root),
        salt=salt,
    )
    keys = tuple(one.key for one in kept)
    return Job(keys[0], keys, f"{schema}: {what or 'the beginning'}", assembly)


def owner_name(schema: str, what: str, root: ChunkKey) -> str:
    """Of the session whose manifest keeps a module. `root`: of a tenant of the worker."""
    tenant = f"{root[:8].hex()}:" if root else ""
    name = f"{OWNER_PREFIX}{tenant}{schema}/{what}"
    if len(name.encode()) <= SESSION_NAME_BYTES_MAX:
        return name
    return f"{OWNER_PREFIX}{tenant}{hashlib.blake2b(name.encode(), digest_size=32).hexdigest()}"


def tenant_salt(salt: bytes, root: ChunkKey) -> bytes:
    """What keys the modules of one tenant of a worker: tenants with the same schema share nothing."""
    if not root:
        return salt
    return hashlib.blake2b(root, digest_size=32, key=salt, person=b"kvs.schema.v1").digest()
