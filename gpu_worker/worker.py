"""A worker process: one model, one engine, many clients over HTTP (see kvstore.gpu_worker.serve.api).

When it serves it writes one line, {"ready": true, "url": ..., "pid": ...}. SIGTERM and SIGINT: no new requests, those
that run have `--drain-s` seconds to end, what is queued is saved; a second one ends at once.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from kvstore.gpu_worker.options import keys_of, parser, text_in
from kvstore.startup import end_at_interrupt, loading

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to loading and saving


def main(arguments: Sequence[str] | None = None) -> None:
    named = parser()
    options = named.parse_args(arguments)
    if not (options.model / "config.json").is_file():
        named.error(
            f"--model {options.model}: no config.json there; name a folder as save_pretrained writes it"
        )
    try:
        keys = keys_of(options.api_keys) if options.api_keys else None
        template = text_in("--chat-template", options.chat_template) if options.chat_template else ""
    except ValueError as error:
        named.error(str(error))
    end_at_interrupt()  # until it serves, and catches signals
    with loading("the worker", extra="worker"):
        from kvstore.gpu_worker.serve.process import Unfit, serve
    logging.basicConfig(level=options.log_level.upper(), stream=sys.stderr, format="worker: %(message)s")
    try:
        serve(options, keys=keys, template=template)
    except Unfit as error:
        named.error(str(error))


if __name__ == "__main__":
    main()
