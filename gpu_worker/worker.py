"""A worker process: one engine that answers turns given as JSON lines on standard input, one line each.

    {"session": "a", "tokens": [1, 2, 3], "max_new_tokens": 20, "stop_tokens": [2]}   -> a TurnResult as JSON
    {"flush": 5.0}      waits for so many seconds until all KV is saved     -> {"flushed": true, "counters": {...}}

The first line it writes, when the model is loaded, is {"ready": true}. A line that it cannot take is answered with
{"error": "..."}. It ends with its input.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvstore.client import connect
from kvstore.errors import BadRequest
from kvstore.gpu_worker.engine import Engine

CONNECT_TIMEOUT_S = 5.0


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    logging.basicConfig(level=options.log_level.upper(), stream=sys.stderr, format="worker: %(message)s")
    if options.threads:
        torch.set_num_threads(options.threads)
    engine = engine_of(options.model, run_dir=options.run_dir, dtype=getattr(torch, options.dtype))
    try:
        _say({"ready": True})
        for line in sys.stdin:
            _say(answer(engine, line))
    finally:
        engine.close()


def engine_of(folder: Path, *, run_dir: str = "", dtype: torch.dtype = torch.float32) -> Engine:
    """An engine for the model saved in `folder`, with the store of the daemon at `run_dir` ("": without)."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    where = os.path.abspath(run_dir)  # also after a change of the working directory
    client = (lambda: connect(where, timeout_s=CONNECT_TIMEOUT_S)) if run_dir else None
    return Engine(model, client)


def answer(engine: Engine, line: str) -> dict[str, Any]:
    """What to say to one line of input."""
    try:
        request = json.loads(line)
        if "flush" in request:
            flushed = engine.flush(float(request["flush"]))
            saved = engine.saver.counters if engine.saver is not None else {}
            return {"flushed": flushed, "counters": {**engine.counters, **saved}}
        result = engine.turn(
            request["session"],
            request["tokens"],
            request["max_new_tokens"],
            stop_tokens=request.get("stop_tokens", ()),
        )
    except (ValueError, KeyError, TypeError, RecursionError, ArithmeticError, BadRequest) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return asdict(result)


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="worker", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with config.json and safetensors files"
    )
    parser.add_argument(
        "--run-dir", default="", help="run directory of kvstored; none: every turn is recomputed"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--threads", type=int, default=0, help="threads that compute (0: as torch chooses)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="warning")
    options = parser.parse_args(arguments)
    if not (options.model / "config.json").is_file():
        parser.error(
            f"--model {options.model}: no config.json there; name a folder as save_pretrained writes it"
        )
    return options


if __name__ == "__main__":
    main()
