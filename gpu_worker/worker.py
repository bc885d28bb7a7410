"""A worker process: one model, one engine, many clients over HTTP (see kvstore.gpu_worker.serve.api).

When it serves it writes one line, {"ready": true, "url": ..., "pid": ...}. SIGTERM and SIGINT: no new requests, those
that run have `--drain-s` seconds to end, what is queued is saved; a second one ends at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from kvstore.gpu_worker.options import keys_of, parser, text_in

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
    # Until it catches signals itself there is nothing to lose: Ctrl-C ends it at once, and without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from kvstore.gpu_worker.serve.process import Unfit, serve
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] == "kvstore":
            raise
        raise SystemExit(f"the worker needs {missing.name}: pip install 'attnstore[worker]'") from None
    logging.basicConfig(level=options.log_level.upper(), stream=sys.stderr, format="worker: %(message)s")
    try:
        serve(options, keys=keys, template=template)
    except Unfit as error:
        named.error(str(error))


if __name__ == "__main__":
    main()
