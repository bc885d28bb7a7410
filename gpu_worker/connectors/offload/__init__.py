"""Rows of an engine's host memory, saved to the store and loaded from it by threads of ours.

For engines that keep a host tier of their own and ask a slower tier about it from a thread that must never wait:

    engine's thread    asks (Inquiry), submits transfers, takes what is finished; never waits, never talks to the daemon
    threads of a Crew  ask the store (Lookups), copy leased slots into rows (RowLoader), let the daemon read rows
                       (RowSaver), tell it who waits (HintBoard), what was used without it and what
                       hints order (Orders)

A row belongs to the engine again once its transfer was reported; nothing touches it from then on (Transfer).
"""

from kvstore.gpu_worker.connectors.offload.boundaries import Group, needed
from kvstore.gpu_worker.connectors.offload.crew import Crew
from kvstore.gpu_worker.connectors.offload.hints import HintBoard
from kvstore.gpu_worker.connectors.offload.loader import RowLoader
from kvstore.gpu_worker.connectors.offload.lookups import Inquiry, Lookups, Needed, Verdict
from kvstore.gpu_worker.connectors.offload.orders import Chains, Order, Orders
from kvstore.gpu_worker.connectors.offload.rows import Rows
from kvstore.gpu_worker.connectors.offload.saver import RowSaver
from kvstore.gpu_worker.connectors.offload.tally import Counts, Tally
from kvstore.gpu_worker.connectors.offload.transfers import Transfer, Transfers

__all__ = [
    "Chains",
    "Counts",
    "Crew",
    "Group",
    "HintBoard",
    "Inquiry",
    "Lookups",
    "Needed",
    "Order",
    "Orders",
    "RowLoader",
    "RowSaver",
    "Rows",
    "Tally",
    "Transfer",
    "Transfers",
    "Verdict",
    "needed",
]
