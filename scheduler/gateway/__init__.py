"""A gateway in front of several OpenAI-compatible servers (vLLM) that share a store: it queues what they cannot take
yet, and tells the daemon what waits, so that its KV is in DRAM when its turn comes.

    process.py     the process: signals, and how long requests have to end
    app.py         HTTP: requests in, answers through as they come, aborts
    dispatch.py    who waits, which server takes whom, and who is left out
    health.py      whether each server is there
    metrics.py     what Prometheus reads
    lookahead.py   prompts to token ids to chunk keys, and what the daemon is told

`python -P -m kvstore.scheduler.gateway --server http://127.0.0.1:8000 --server http://127.0.0.1:8001 --run-dir DIR`.
With `--server URL=NODE` a request goes where most of its beginning is (docs/peers.md). It needs
`pip install "attnstore[gateway]"`. A daemon that is away or slow costs hints, never an answer.
"""
