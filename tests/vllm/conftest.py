"""Tests with a real vLLM engine. vLLM has an environment of its own (`make test-vllm`); elsewhere these are skipped."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
