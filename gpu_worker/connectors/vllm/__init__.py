"""vLLM's door to the store: a KV connector, for `--kv-transfer-config`. See docs/vllm.md.

Importable only where vLLM is.
"""

from kvstore.gpu_worker.connectors.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
