"""Planted bugs: a simulator that does not find them finds nothing. Each is patched into the core from outside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from kvstore import directory
from kvstore.core import events as ev
from kvstore.core.chunks import DOOMED, LISTED, NONE, ChunkTable
from kvstore.core.directory import GONE, HIT, Directory
from kvstore.core.jobs import JobBook
from kvstore.core.manifests import Session
from kvstore.core.namespaces import Namespace
from kvstore.core.policies import Candidates
from kvstore.core.policies.expected import Expected
from kvstore.core.policies.hints import Hints
from kvstore.core.pool import Pool, Segment
from kvstore.core.quotas import Quotas
from kvstore.core.remote.forgets import Channel, Forgets
from kvstore.core.remote.saves import RemoteSaves
from kvstore.core.remote.sessions import SharedSessions
from kvstore.core.remote.sources import Sources
from kvstore.core.requests import reads
from kvstore.core.requests.hint_actions import HintActions
from kvstore.core.requests.queue import Queue
from kvstore.core.requests.saves import Saves
from kvstore.core.requests.sessions import Sessions
from kvstore.core.requests.touches import Touches
from kvstore.core.segments import PASSED_OVER_MAX, Segments
from kvstore.core.ssd.durability import Durability
from kvstore.core.state import State
from kvstore.core.transfers import Read, Transfers
from kvstore.tiers.remote import records
from kvstore.tiers.remote.tombstones import Journal
from kvstore.types import ChunkKey, DiskResult, DiskState, NamespaceId, OpId, Outcome, Reason, StagedPiece

Original = Callable[..., Any]


def _generation(original: Original) -> Any:
    """The generation of a slot that is given back stays what it was."""
    return lambda pool, segment, slot: None


def _pinned(original: Original) -> Any:
    """The first release takes the pins of everybody."""

    def unpin(state: State, namespace: Namespace, rows: Sequence[int], *, used: bool = True) -> None:
        for row in rows:
            if state.chunks.pins[row] > 1:
                state.chunks.pins[row] = 1
        original(state, namespace, rows, used=used)

    return unpin


def _doomed(original: Original) -> Any:
    """What was forgotten or found to be corrupt is served as long as its bytes are there."""

    def lookup(state: State, namespace: Namespace, key: ChunkKey) -> reads.Found:
        found: reads.Found = original(state, namespace, key)
        row = found[0]
        if row != NONE and state.chunks.flags[row] & DOOMED and state.is_resident(row):
            return row, Outcome.HIT, Reason.NONE
        return found

    return lookup


def _partial(original: Original) -> Any:
    """A chunk is a hit with its first shard."""

    def lookup(state: State, namespace: Namespace, key: ChunkKey) -> reads.Found:
        found: reads.Found = original(state, namespace, key)
        row = found[0]
        if row != NONE and state.chunks.shard0[row] != NONE and state.chunks.ready[row]:
            return row, Outcome.HIT, Reason.NONE
        return found

    return lookup


def _leak(original: Original) -> Any:
    """The last slot of a reservation that ends without a commit is forgotten."""

    def end(saves: Saves, reservation: Any, *args: Any, **named: Any) -> None:
        with mock.patch.object(State, "free_slot", _but_the_last(State.free_slot, len(reservation.rows))):
            original(saves, reservation, *args, **named)

    return end


def _but_the_last(free_slot: Original, count: int) -> Any:
    freed = 0

    def free(state: State, segment: Segment, slot: int) -> None:
        nonlocal freed
        freed += 1
        if freed < count:
            free_slot(state, segment, slot)

    return free


def _late_read(original: Original) -> Any:
    """The targets of a late read are used again at once, while it may still write them."""

    def late(transfers: Transfers, op: OpId, read: Read) -> None:
        original(transfers, op, read)
        for segment, slot in read.quarantined or ():
            transfers.state.free_slot(segment, slot)
        read.quarantined = []

    return late


def _late_copy(original: Original) -> Any:
    """As above, for the copy of a commit."""

    def give_up(saves: Saves, reservation: Any, *args: Any, **named: Any) -> None:
        ops = list(reservation.copies)
        original(saves, reservation, *args, **named)
        for op in ops:
            for segment, slot in saves.late[op].slots:
                saves.state.free_slot(segment, slot)
            saves.late[op].slots.clear()

    return give_up


def _early(original: Original) -> Any:
    """A commit that waits for durability is answered at once."""

    def await_durable(
        durability: Durability,
        ticket: ev.Ticket,
        namespace: Namespace,
        keys: Sequence[ChunkKey],
        answer: ev.Committed | ev.Saved,
    ) -> None:
        durability.state.reply(ticket, answer)

    return await_durable


def _gone_too_early(original: Original) -> Any:
    """A forget is answered as durable at once."""
    return lambda durability, ticket, count: ev.Done(count)


def _unsynced(original: Original) -> Any:
    """Index transactions sync nothing."""

    def batch(durability: Durability, op: OpId) -> Any:
        durability.unsynced = set()
        return original(durability, op)

    return batch


def _lost_answer(original: Original) -> Any:
    """Now and then nobody is told."""
    count = 0

    def reply(state: State, ticket: ev.Ticket, answer: object) -> None:
        nonlocal count
        count += 1
        before = len(state.effects)
        original(state, ticket, answer)
        if count % 50 == 0:
            del state.effects[before]

    return reply


def _twice(original: Original) -> Any:
    """Now and then somebody is told twice."""
    count = 0

    def reply(state: State, ticket: ev.Ticket, answer: object) -> None:
        nonlocal count
        count += 1
        original(state, ticket, answer)
        if count % 50 == 0:
            state.effects.append(ev.Reply(ticket, answer))  # type: ignore[arg-type]

    return reply


def _tenant(original: Original) -> Any:
    """Whoever knows the number of a namespace may use it."""

    def namespace(state: State, worker: Any, namespace_id: NamespaceId) -> Namespace:
        if namespace_id in state.namespaces:
            worker.opened.add(namespace_id)
        found: Namespace = original(state, worker, namespace_id)
        return found

    return namespace


def _stale_session(original: Original) -> Any:
    """A session's old references are never dropped."""
    return lambda state, row, reason=Reason.TRUNCATED: None


def _rank(original: Original) -> Any:
    """Victims are taken although they are pinned: the list of candidates does not shrink."""

    def remove(policy: Hints, candidates: Candidates, row: int) -> None:
        if not policy._chunks.pins[row]:
            return
        original(policy, candidates, row)

    return remove


def _unchecked(original: Original) -> Any:
    """Bytes from SSD are taken for good whatever the disk says."""

    def has_read(transfers: Transfers, op: OpId, results: Sequence[DiskResult], *args: Any) -> None:
        original(transfers, op, [DiskResult.OK] * len(results), *args)

    return has_read


def _failed_audit(original: Original) -> Any:
    """A checksum that failed is taken for one that differs."""

    def audited(audits: reads.Reads, op: OpId, checksums: Sequence[int] | None) -> int:
        _, expected = audits.audits[op]
        found: int = original(audits, op, [0] * len(expected) if checksums is None else checksums)
        return found

    return audited


def _retired(original: Original) -> Any:
    """A segment is handed to another namespace although somebody maps it."""

    def replace(segments: Segments, segment: Segment) -> None:
        segment.holders.clear()
        original(segments, segment)

    return replace


def _forgets_parent(original: Original) -> Any:
    """A row that is used again keeps the children of the one before."""
    return lambda chunks, row: None


def _still_needed(original: Original) -> Any:
    """A chunk that is gone goes on being planned with."""
    return lambda jobs, row: None


def _not_noticed(original: Original) -> Any:
    """A chunk that a queued job waits for comes, and the plan stays what it was."""
    return lambda jobs, namespace, key: None


def _not_inherited(original: Original) -> Any:
    """A session that a queued job names has other chunks, and the plan has those of before."""
    return lambda jobs, namespace, name: None


def _any_number(original: Original) -> Any:
    """A change of a queue is taken although the one before it was lost."""

    def publish(queue: Queue, worker: Any, event: ev.PublishQueue) -> Any:
        feed = queue.feeds.get(worker.id, {}).get(event.namespace)
        if feed is not None and event.number > feed.number + 1:
            feed.number = event.number - 1
        return original(queue, worker, event)

    return publish


def _any_model(original: Original) -> Any:
    """A hint by model is for whichever namespace was opened last, whosesoever it is."""

    def namespaces(state: State, namespace: Namespace) -> list[Namespace]:
        return sorted(state.namespaces.values(), key=lambda each: each.opened, reverse=True)

    return namespaces


def _unshared_pins(original: Original) -> Any:
    """Whoever pinned first keeps it all, however many tenants come."""
    return lambda actions, kind: None


def _outlived(original: Original) -> Any:
    """Orders of a worker that is gone stay in force."""
    return lambda actions, worker: None


def _touched_pinned(original: Original) -> Any:
    """A touch makes evictable what a lease pins."""

    def renew(touches: Touches, namespace: Namespace, rows: Sequence[int]) -> None:
        original(touches, namespace, rows)
        state = touches._state
        pinned = [row for row in rows if state.chunks.pins[row] and not state.chunks.flags[row] & LISTED]
        state.policy.add(namespace.dram, pinned)

    return renew


def _holes(original: Original) -> Any:
    """What stands behind a hole of a manifest is said to be there."""

    def usable(sessions: Sessions, session: Session) -> tuple[int, bytes]:
        leading, beyond = original(sessions, session)
        return leading, bytes([*beyond[:1], *(1 for _ in beyond[1:])])

    return usable


def _aged(original: Original) -> Any:
    """What is used stands among what was never used."""
    return lambda policy, candidates, kind, since: original(policy, candidates, kind, 0)


def _late_bump(original: Original) -> Any:
    """Generations move on after what follows from it."""

    def take(state: State) -> list[ev.Effect]:
        effects = original(state)
        bumps = [effect for effect in effects if isinstance(effect, ev.SetGenerations)]
        return [effect for effect in effects if not isinstance(effect, ev.SetGenerations)] + bumps

    return take


def _early_publish(original: Original) -> Any:
    """Readers are told of a chunk whose bytes are still to come."""

    def condition(directory: Directory, row: int) -> int:
        chunks = directory._state.chunks
        placed = chunks.ready[row] + chunks.reserved[row]
        if chunks.shard0[row] != NONE and placed == directory._state.namespace_of(row).shards:
            return HIT
        return GONE

    def take(directory: Directory) -> Any:
        state = directory._state
        assert isinstance(state, State)
        directory.noted.update(dict.fromkeys(state.chunks.walk(state.partials)))
        with mock.patch.object(Directory, "_condition", condition):
            return original(directory)

    return take


def _row_reused(original: Original) -> Any:
    """The row of a chunk that is gone is another's at once, and nobody withdraws it."""

    def forget(directory: Directory, row: int) -> None:
        column = directory._state.chunks.directory
        if column[row] != NONE:
            directory._state.namespace_of(row).directory_free.append(column[row])
            column[row] = NONE

    return forget


def _untold(original: Original) -> Any:
    """Readers are not told that a chunk has gone."""
    return lambda state, row: original(state, row) if state.is_hit(row) else None


def _untagged(original: Original) -> Any:
    """Bytes are not bound to their key: a row torn between key and place passes for a good one."""
    return lambda hashed: hashed * 0 + 1


def _open_while_off(original: Original) -> Any:
    """Readers are told of chunks on an SSD that is off."""

    def look(directory: Directory) -> None:
        state = directory._state
        with mock.patch.object(state, "disk_state", DiskState.OK):
            original(directory)

    return look


def _first_pieces(original: Original) -> Any:
    """A Save of which some is granted copies the first pieces, not those of what was granted."""

    def save(saves: Saves, worker: Any, event: Any) -> Any:
        answer = original(saves, worker, event)
        copy = saves.state.effects[-1] if saves.state.effects else None
        if answer is None and isinstance(copy, ev.CopyIn):
            lengths = [target.length for target in copy.targets]
            pieces = tuple(map(StagedPiece, event.offsets, lengths))
            saves.state.effects[-1] = replace(copy, pieces=pieces)
        return answer

    return save


def _awaited(original: Original) -> Any:
    """What somebody asked for, and is about to take, leaves DRAM as if nobody had."""

    def evict_one(segments: Segments, namespace: Namespace, sooner_than: int) -> bool:
        victims = segments.state.policy.victims(namespace.dram, PASSED_OVER_MAX, sooner_than)
        return any(map(segments._leave_dram, victims)) or bool(original(segments, namespace, sooner_than))

    return evict_one


def _one_victim(original: Original) -> Any:
    """Where the next victim has to stay, nothing goes."""

    def evict_unneeded(
        segments: Segments, namespace: Namespace, sooner_than: int, awaited: list[int]
    ) -> bool:
        row = next(segments.state.policy.unneeded(namespace.dram), None)
        if row is None or segments._is_asked_for(row, sooner_than):
            return False
        return segments._leave_dram(row)

    return evict_unneeded


def _no_dram_quota(original: Original) -> Any:
    """A tenant takes slots without end as long as some are free."""
    return lambda segments, namespace, slot_bytes, sooner_than: True


def _no_ssd_quota(original: Original) -> Any:
    """What is used on SSD is counted too low: what is being written is forgotten."""
    return lambda quotas, tenant: original(quotas, tenant) // 2


def _no_remote_quota(original: Original) -> Any:
    """What goes for a chunk of a tenant at its quota may be anybody's."""

    def giving_way(saves: RemoteSaves, names: Any, room: int, size: int, worth: float) -> Any:
        own = saves.stored_of.values()
        return (
            {}
            if names == () or any(names is mine for mine in own)
            else original(saves, names, room, size, worth)
        )

    return giving_way


def _any_record(original: Original) -> Any:
    """Whatever record is under a name is taken for the one that was asked for."""
    return lambda header, **wanted: ""


def _still_here(original: Original) -> Any:
    """What another node has forgotten stays where this node has it."""
    return lambda forgets, learned, row, key: None


def _too_new(original: Original) -> Any:
    """A record claims to be newer than all forgets."""

    def store(saves: RemoteSaves, rows: list[int], size: int) -> None:
        original(saves, rows, size)
        effects = saves.state.effects
        last = effects[-1]
        assert isinstance(last, ev.StoreChunks), last
        effects[-1] = replace(last, generation=1 << 40)

    return store


def _overwrites(original: Original) -> Any:
    """Who is refused tries again with what it was shown, whatever is lost by that."""

    def refused(sessions: SharedSessions, name: Any, kind: Any, there: Any) -> None:
        original(sessions, name, kind, there)
        if name in sessions.state.sessions.by_name:
            sessions.changed[name] = False

    return refused


def _told_whole(original: Original) -> Any:
    """What was cut is told as if it were exact."""

    def manifest(sessions: SharedSessions, session: Any) -> Any:
        rows = session.manifest.rows
        return tuple(map(sessions.state.chunks.key.__getitem__, rows)), tuple(session.manifest.count)

    return manifest


def _spares_ssd(original: Original) -> Any:
    """Of a tenant that is purged only what is in DRAM goes."""
    return lambda forgets, row: original(forgets, row) if forgets.state.is_resident(row) else None


def _heeds_none(original: Original) -> Any:
    """A start takes what its journal says for carried out."""
    return lambda journal, heeded: []


def _heeds_all(original: Original) -> Any:
    """Each start heeds all of its journal again."""
    return lambda journal, heeded: original(journal, None)


def _never_noted(original: Original) -> Any:
    """Nothing is said of what was carried out."""
    return lambda forgets: None


def _told_when_answered(original: Original) -> Any:
    """What a source could not be told counts as told."""
    return property(lambda channel: channel.answered)


def _not_anew(original: Original) -> Any:
    """What a node heard of as forgotten while it was on its way is a miss, though it was saved again since."""
    return lambda sources, row: False


REMOTE_CANARIES: dict[str, tuple[Any, str, Callable[[Original], Any]]] = {
    "over-remote-quota": (RemoteSaves, "_giving_way", _no_remote_quota),
    "any-record": (records, "refusal", _any_record),
    "forgotten-elsewhere": (Forgets, "_drop", _still_here),
    "record-too-new": (RemoteSaves, "_store", _too_new),
    "overwrite-newer-session": (SharedSessions, "_was_refused", _overwrites),
    "tell-derived-session": (SharedSessions, "_manifest", _told_whole),
    "heed-all-again": (Journal, "behind", _heeds_all),
    "heeded-unsaid": (Forgets, "_note_heeded", _never_noted),
}
"""What only a run with a REMOTE store finds."""

FLEET_CANARIES: dict[str, tuple[Any, str, Callable[[Original], Any]]] = {
    "heed-none": (Journal, "behind", _heeds_none),
    "purge-spares-ssd": (Forgets, "purge_row", _spares_ssd),
    "saved-again-is-slow": (Sources, "_is_to_ask_anew", _not_anew),
    "untold-is-done": (Channel, "told", _told_when_answered),
}
"""What only a run with other nodes finds."""

CANARIES: dict[str, tuple[Any, str, Callable[[Original], Any]]] = {
    "over-dram-quota": (Segments, "_fits_quota", _no_dram_quota),
    "over-ssd-quota": (Quotas, "ssd_bytes", _no_ssd_quota),
    "late-bump": (State, "take_effects", _late_bump),
    "early-publish": (Directory, "take", _early_publish),
    "reuse-row": (Directory, "forget", _row_reused),
    "untold": (State, "note", _untold),
    "torn-row": (directory, "tags_of", _untagged),
    "read-while-off": (Directory, "_look_at_all", _open_while_off),
    "forget-use": (Expected, "_cohort", _aged),
    "skip-generation": (Pool, "_bump", _generation),
    "free-pinned": (State, "unpin", _pinned),
    "serve-doomed": (reads, "lookup", _doomed),
    "serve-partial": (reads, "lookup", _partial),
    "leak-slot": (Saves, "_end", _leak),
    "save-first-pieces": (Saves, "save", _first_pieces),
    "reuse-late-read": (Transfers, "_late_read", _late_read),
    "reuse-late-copy": (Saves, "_give_up_copies", _late_copy),
    "durable-too-early": (Durability, "await_durable", _early),
    "gone-too-early": (Durability, "await_gone", _gone_too_early),
    "index-without-sync": (Durability, "_batch", _unsynced),
    "lose-answer": (State, "reply", _lost_answer),
    "answer-twice": (State, "reply", _twice),
    "cross-tenant": (State, "namespace", _tenant),
    "keep-references": (State, "drop_ref", _stale_session),
    "evict-pinned": (Hints, "remove", _rank),
    "failed-is-corrupt": (reads.Reads, "audited", _failed_audit),
    "trust-disk": (Transfers, "_has_read", _unchecked),
    "mapped-elsewhere": (Segments, "_replace_if_unmapped", _retired),
    "plan-with-lost": (JobBook, "lost", _still_needed),
    "plan-without-new": (JobBook, "came", _not_noticed),
    "plan-old-session": (JobBook, "session_changed", _not_inherited),
    "skip-lost-hints": (Queue, "publish", _any_number),
    "hint-anywhere": (State, "namespaces_of_model", _any_model),
    "unshared-pins": (HintActions, "_share", _unshared_pins),
    "outlived-hint": (HintActions, "forget", _outlived),
    "touch-pinned": (Touches, "_renew_resident", _touched_pinned),
    "ignore-holes": (Sessions, "_usable", _holes),
    "evict-awaited": (Segments, "_evict_one", _awaited),
    "one-victim": (Segments, "_evict_unneeded", _one_victim),
    "keep-children": (ChunkTable, "leave_children", _forgets_parent),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """While it lasts, the core has this bug ("": none)."""
    if not name:
        yield
        return
    where, attribute, make = (CANARIES | REMOTE_CANARIES | FLEET_CANARIES)[name]
    with mock.patch.object(where, attribute, make(getattr(where, attribute))):
        yield
