"""SGLang's door to the store: a storage backend of HiCache. See docs/sglang.md.

Importable only where SGLang is.
"""

from kvstore.gpu_worker.connectors.sglang.backend import KVStoreHiCache

__all__ = ["KVStoreHiCache"]
