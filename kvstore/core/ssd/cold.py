"""Chunks on SSD only and not promoting: who may leave the SSD, by the size of the slots that this frees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.core.policies import Candidates


class Cold:
    """Chunks on SSD only and not promoting: one `Candidates` for the namespaces whose shards take slots of equal sizes
    there, a chunk of another size gives way in vain; and one more for each tenant with a quota, who gives way to
    itself."""

    __slots__ = ("_candidates", "by_sizes")

    def __init__(self, candidates: Callable[[], Candidates]) -> None:
        """`candidates` makes those of another kind (`Policy.candidates`)."""
        self._candidates = candidates
        self.by_sizes: dict[tuple[frozenset[int], str], Candidates] = {}

    def __repr__(self) -> str:
        return f"Cold({self.count} chunks of {len(self.by_sizes)} kinds)"

    @property
    def count(self) -> int:
        return sum(candidates.count for candidates in self.by_sizes.values())

    def of(self, sizes: frozenset[int], tenant: str = "") -> Candidates:
        """Of chunks with shards of these slot sizes, in bytes; of one `tenant`, or of all that have no quota."""
        found = self.by_sizes.get((sizes, tenant))
        if found is None:
            found = self.by_sizes[sizes, tenant] = self._candidates()
        return found

    def with_slots_of(self, slot_bytes: int) -> list[Candidates]:
        return [candidates for (sizes, _), candidates in self.by_sizes.items() if slot_bytes in sizes]

    def keep(self, used: Sequence[Candidates]) -> None:
        """No namespace uses the others any more."""
        kept = set(map(id, used))
        self.by_sizes = {name: mine for name, mine in self.by_sizes.items() if id(mine) in kept}
