"""Prompts in PML, of schemas that the daemon keeps, as what the engine is asked.

A prompt names its schema, not a version of it. It is served by the current version; but while the beginning of a new
version is being encoded, by the newest earlier one of which everything is there that the prompt needs. Either way all
of the prompt is of one version: a module of an edited schema is never met by the text of another.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvstore.client.schemas import get_schema, list_schemas
from kvstore.errors import NotFound, StoreError, Unavailable
from kvstore.gpu_worker.assembly import Assembly
from kvstore.gpu_worker.promptcache.plan import (
    Job,
    Recipe,
    assemble,
    document_jobs,
    jobs,
    tenant_salt,
)
from kvstore.keys import ROOT
from kvstore.promptcache import Encoding, Layout, PmlError, Schema, Tokenizer, parse_prompt, parse_schema
from kvstore.promptcache.encoding import Unit
from kvstore.promptcache.layout import Placement, Source
from kvstore.promptcache.schema import Path
from kvstore.types import KEYS_PER_REQUEST_MAX, ChunkKey, Outcome

if TYPE_CHECKING:
    from kvstore.client import Client, Namespace
    from kvstore.gpu_worker.batching import BatchEngine

SIBLINGS_MAX = 512
"""Chunks of the members of unions that a prompt did not choose, which are told the daemon."""
KEPT_MAX = 64
"""Schemas, layouts and encodings that are kept, each; fewer ..."""
KEPT_COST_MAX = 1_000_000
"""... where they are large: tokens, and `MODULE_COST` for each module. An encoding takes some 120 bytes for each."""
MODULE_COST = 32
LISTED_MAX = 3
"""How often the versions of a schema are asked for that is edited meanwhile."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class Library(Protocol):
    def versions(self, name: str) -> Sequence[Schema]:
        """Of a schema, the current one first; none where there is no such schema. Raises StoreError."""


class DaemonLibrary:
    """Schemas that the daemon keeps for this worker's user. A version's text is asked for once; which is the current
    one, for each prompt."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        self._connect = connect
        self._client: Client | None = None
        self._schemas: _Kept[Schema] = _Kept(lambda schema: _schemas_cost([schema]))
        self._last: _Kept[tuple[Schema, ...]] = _Kept(_schemas_cost)
        """By name, for while there is no daemon: what was KV then may still be computed."""

    def versions(self, name: str) -> Sequence[Schema]:
        try:
            client = self._client = self._client or self._connect()
            found = self._found(client, name)
        except Unavailable:
            if (last := self._last.peek(name)) is not None:
                return last
            raise
        self._last.put(name, found)
        return found

    def _found(self, client: Client, name: str) -> tuple[Schema, ...]:
        for _ in range(LISTED_MAX):
            rows = [row for row in list_schemas(client, name=name, all_versions=True) if row.name == name]
            found: list[Schema] = []
            try:
                for row in rows:
                    if (schema := self._version(client, name, row.digest, current=not found)) is not None:
                        found.append(schema)
            except NotFound:
                continue  # the current version was removed, or replaced more often than versions are kept
            return tuple(found)
        return ()

    def _version(self, client: Client, name: str, digest: bytes, *, current: bool) -> Schema | None:
        """None for an earlier one that is not there any more, or that is no schema to this worker."""
        try:
            return self._schemas.get(digest, lambda: self._read(client, name, digest))
        except NotFound:
            if current:
                raise
        except PmlError as error:
            if current:
                raise
            log.warning("an earlier version of %s is left out: %s", name, error)
        return None

    def _read(self, client: Client, name: str, digest: bytes) -> Schema:
        return parse_schema(get_schema(client, name, digest=digest).text, document=name)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


@dataclass(frozen=True, slots=True)
class Planned:
    """A prompt as the engine takes it. `assembly`: None for one without modules."""

    schema: str
    version: bytes
    tokens: tuple[int, ...] = field(repr=False)
    assembly: Assembly | None
    end: int
    """The position of the reply."""
    stored: int
    """Tokens whose KV the store can have."""
    stale: bool = False
    """It is of an earlier version, since what it needs of the current one is not encoded yet."""
    wanted: tuple[Job, ...] = ()
    """What would have to be encoded for it to be a hit, of the current version. Those that are there are among them."""
    siblings: tuple[ChunkKey, ...] = ()
    """Of the other members of unions that it has a member of."""

    def missing(self, keys: frozenset[ChunkKey] | None) -> list[Job]:
        """What of it is to be encoded, if the store did not have these; None: it was not asked."""
        if self.stale or keys is None:
            return list(self.wanted)
        return [job for job in self.wanted if not keys.isdisjoint(job.keys)]


class Prompts:
    """Plans prompts, from one thread at a time. All that it keeps can be made again."""

    def __init__(self, engine: BatchEngine, tokenizer: Tokenizer, library: Library) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._library = library
        self._layouts: _Kept[Layout] = _Kept(_layout_cost)
        self._encodings: _Kept[tuple[Encoding, tuple[Job, ...]]] = _Kept(_encoding_cost)
        self._lock = threading.Lock()

    def plan(self, text: str, recipe: Recipe, root: ChunkKey = ROOT) -> Planned:
        """Raises PmlError for what is wrong with the prompt, StoreError where its schema cannot be read. `root`: of the
        tenant: what the keys of its chunks begin with."""
        with self._lock:
            return self._plan(text, recipe, root)

    def _plan(self, text: str, recipe: Recipe, root: ChunkKey) -> Planned:
        found: list[Schema] = []

        def find(name: str) -> Schema | None:
            found[:] = self._library.versions(name)
            return found[0] if found else None

        parse_prompt(text, find)
        namespace = self._engine.namespace
        current = self._planned(text, found, namespace, recipe, root)
        if len(found) < 2 or current.assembly is None or namespace is None:
            return current
        if self._beginning(found[0]) == self._beginning(found[1]) or self._is_there(namespace, current):
            return current
        for number in range(1, len(found)):
            try:
                planned = self._planned(text, found[number:], namespace, recipe, root)
            except PmlError:
                continue  # it has no such module yet
            if planned.assembly is not None and self._is_there(namespace, planned):
                return Planned(
                    planned.schema,
                    planned.version,
                    planned.tokens,
                    planned.assembly,
                    planned.end,
                    planned.stored,
                    stale=True,
                    wanted=current.wanted,
                )
        return current

    def _planned(
        self,
        text: str,
        versions: Sequence[Schema],
        namespace: Namespace | None,
        recipe: Recipe,
        root: ChunkKey,
    ) -> Planned:
        """Of the first of these versions; the others came before it, the newest first."""
        schema = versions[0]
        prompt = parse_prompt(text, schema)
        layout = self._layout(schema)
        placement = layout.place(prompt)
        salt = namespace.salt if namespace is not None else bytes(32)
        encoding, all_jobs = self._encode(schema, salt, root, recipe)
        if namespace is not None and len(versions) > 1 and self._engine.moves:
            encoding = self._moved(encoding, placement, versions[1:], namespace, root, recipe)
        assembly = assemble(encoding, placement, salt=salt, moves=self._engine.moves, recipe=recipe)
        needed = {part.key for part in assembly.parts} if assembly is not None else set()
        return Planned(
            schema.name,
            schema.digest,
            tuple(placement.tokens) if assembly is None else assembly.tokens,
            assembly,
            placement.end,
            placement.stored,
            wanted=tuple(
                job
                for job in (*all_jobs, *document_jobs(encoding, placement, salt=salt, root=root))
                if not needed.isdisjoint(job.keys)
            ),
            siblings=tuple(
                key
                for path in _siblings(schema, layout.used(prompt))
                if path in encoding.units
                for key in encoding.units[path].keys
            )[:SIBLINGS_MAX],
        )

    def _layout(self, schema: Schema) -> Layout:
        return self._layouts.get(
            schema.digest,
            lambda: Layout(
                schema, self._tokenizer, positions_max=self._engine.positions_max, document=schema.name
            ),
        )

    def _beginning(self, schema: Schema) -> tuple[int, ...]:
        layout = self._layout(schema)
        return layout.segments[0].tokens if layout.beginning else ()

    def _encode(
        self, schema: Schema, salt: bytes, root: ChunkKey, recipe: Recipe
    ) -> tuple[Encoding, tuple[Job, ...]]:
        def make() -> tuple[Encoding, tuple[Job, ...]]:
            size = self._engine.pool.geometry.chunk_tokens
            encoding = Encoding(
                self._layout(schema), tenant_salt(salt, root), chunk_tokens=size, method=recipe.method
            )
            return encoding, tuple(jobs(encoding, salt=salt, root=root))

        return self._encodings.get((schema.digest, salt, root, recipe.method), make)

    def _moved(
        self,
        encoding: Encoding,
        placement: Placement,
        earlier: Sequence[Schema],
        namespace: Namespace,
        root: ChunkKey,
        recipe: Recipe,
    ) -> Encoding:
        """What an edit only moved is not encoded again: of a prompt's modules that are not in the store, those take the
        KV that they had in an earlier version of which it is there."""
        used = {run.path for run in placement.runs if run.source is Source.STORED}
        before = []
        for schema in earlier:
            try:
                before.append(self._encode(schema, namespace.salt, root, recipe)[0])
            except PmlError as error:
                log.warning("nothing is kept of an earlier version of %s: %s", schema.name, error)
        found = {path: units for path, units in encoding.moved_from(before).items() if path in used}
        taken: dict[Path, Unit] = {}
        for path, units in found.items():
            if self._has(namespace, encoding.units[path].keys):
                continue
            old = next((one for one in units if self._has(namespace, one.keys)), None)
            if old is not None:
                taken[path] = old
        return encoding.replaced(taken) if taken else encoding

    def _is_there(self, namespace: Namespace, planned: Planned) -> bool:
        """Whether the store has all parts, as far as it can be asked at once."""
        assert planned.assembly is not None
        keys = list(dict.fromkeys(part.key for part in planned.assembly.parts))
        return self._has(namespace, keys, else_=True)

    def _has(self, namespace: Namespace, keys: Sequence[ChunkKey], *, else_: bool = False) -> bool:
        """Whether the store has all of these, as far as it can be asked at once; `else_`: if it cannot be asked."""
        if not keys:
            return True
        try:
            outcomes = namespace.match(keys[:KEYS_PER_REQUEST_MAX]).outcomes
        except StoreError as error:
            log.warning("cannot ask which modules are there: %s", error)
            return else_
        return all(outcome is not Outcome.MISS for outcome in outcomes)


def _siblings(schema: Schema, used: set[Path]) -> Iterator[Path]:
    """The members of unions that are in no prompt with those that it uses."""
    for path in sorted(used):
        scope = schema.scopes[path]
        chosen = {union for name, union in scope.unions.items() if (*path, name) in used}
        yield from (
            (*path, name)
            for name, union in scope.unions.items()
            if union in chosen and (*path, name) not in used
        )


class _Kept(Generic[T]):
    """The last ones that were asked for; the very last one whatever it costs."""

    def __init__(self, cost: Callable[[T], int] = lambda value: 1) -> None:
        self._cost = cost
        self._values: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._sum = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._values:
            self.put(key, make())
        self._values.move_to_end(key)
        return self._values[key][0]

    def peek(self, key: Hashable) -> T | None:
        found = self._values.get(key)
        return None if found is None else found[0]

    def put(self, key: Hashable, value: T) -> None:
        self._drop(key)
        self._values[key] = value, self._cost(value)
        self._sum += self._values[key][1]
        while len(self._values) > 1 and (len(self._values) > KEPT_MAX or self._sum > KEPT_COST_MAX):
            self._drop(next(iter(self._values)))

    def _drop(self, key: Hashable) -> None:
        _, cost = self._values.pop(key, (None, 0))
        self._sum -= cost


def _layout_cost(layout: Layout) -> int:
    return MODULE_COST * len(layout.segments) + sum(len(segment.tokens) for segment in layout.segments)


def _encoding_cost(kept: tuple[Encoding, tuple[Job, ...]]) -> int:
    return _layout_cost(kept[0].layout)


def _schemas_cost(schemas: Sequence[Schema]) -> int:
    return sum(MODULE_COST * len(schema.scopes) + schema.characters // 4 for schema in schemas)
