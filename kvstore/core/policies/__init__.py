"""Which chunk goes first, from DRAM and from SSD: one file for each policy, and one line here.

    expected  what no queued job needs goes first, in the order of the hits that a slot may expect of it, learnt from
              what each tenant's chunks did before; then what is needed, as with "hints"
    hints     what no queued job needs goes first, least recently used first; then what is needed, latest job first, and
            of one job the end of the chain before its beginning (AttentionStore, section 3.3: the eviction window is
            the part of the queue that is ranked here)
    lru       least recently used first, whatever the queue says
    fifo      in the order of arrival

`interface.py` says what a policy promises, `lists.py` has what policies share.
"""

from __future__ import annotations

from kvstore.core.policies.expected import Expected
from kvstore.core.policies.fifo import Fifo
from kvstore.core.policies.hints import Hints
from kvstore.core.policies.interface import Policy
from kvstore.core.policies.lists import Candidates
from kvstore.core.policies.lru import Lru

POLICIES: dict[str, type[Policy]] = {
    "expected": Expected,
    "hints": Hints,
    "lru": Lru,
    "fifo": Fifo,
}
"""By what the setting `eviction` says."""

__all__ = ["POLICIES", "Candidates", "Policy"]
