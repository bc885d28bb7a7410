"""A worker process: one model, one engine, many clients over HTTP (see kvstore.gpu_worker.serve.api).

When it serves it writes one line, {"ready": true, "url": ..., "pid": ...}. SIGTERM and SIGINT: no new requests, those
that run have `--drain-s` seconds to end, what is queued is saved; a second one ends at once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to loading and saving

try:
    import torch
    import uvicorn
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

    from kvstore.client import connect
    from kvstore.errors import Unsupported
    from kvstore.gpu_worker.batching import WAITING_MAX, BatchEngine
    from kvstore.gpu_worker.layout import CHUNK_TOKENS, Geometry, model_name
    from kvstore.gpu_worker.promptcache.prompts import DaemonLibrary
    from kvstore.gpu_worker.promptcache.service import PromptCache
    from kvstore.gpu_worker.serve.api import Api
    from kvstore.gpu_worker.serve.connection import Connection
    from kvstore.gpu_worker.serve.metrics import Metrics
    from kvstore.gpu_worker.serve.service import Service
    from kvstore.gpu_worker.serve.text import Text
    from kvstore.gpu_worker.truncation import Truncation
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] == "kvstore":
        raise
    raise SystemExit(f"the worker needs {missing.name}: pip install 'attnstore[worker]'") from None

CONNECT_TIMEOUT_S = 5.0
CONNECTIONS_TO_SPARE = 256
"""Beside those of requests that run or wait: more are answered 503."""
SUFFIXES = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not (options.model / "config.json").is_file():
        parser.error(
            f"--model {options.model}: no config.json there; name a folder as save_pretrained writes it"
        )
    try:
        keys = keys_of(options.api_keys) if options.api_keys else None
        template = text_in("--chat-template", options.chat_template) if options.chat_template else ""
    except ValueError as error:
        parser.error(str(error))
    logging.basicConfig(level=options.log_level.upper(), stream=sys.stderr, format="worker: %(message)s")
    if options.threads:
        torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    try:
        engine = engine_of(model, options)
    except (ValueError, Unsupported) as error:
        parser.error(str(error))
    text = text_of(options.model, template)
    metrics = Metrics(engine)
    config = uvicorn.Config(
        None,  # type: ignore[arg-type]
        host=options.host,
        port=options.port,
        uds=options.socket or None,
        http=Connection,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=options.drain_s,
        limit_concurrency=options.sequences_max + options.waiting_max + CONNECTIONS_TO_SPARE,
    )
    service = Service(engine, ended=metrics.ended)
    config.app = Api(
        service,
        metrics,
        text,
        prompt_cache=prompt_cache_of(service, text, options),
        model=options.name or model_name(model),
        stop_tokens=stop_tokens_of(model),
        keys=keys,
    ).app()
    # uvicorn raises the signal that ended it once more, when all is over: then there is nothing left to do
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    _Server(config, options.socket).run()


class _Server(uvicorn.Server):
    """Says on standard output where it is, once it is there, and ends at once at the second signal."""

    def __init__(self, config: uvicorn.Config, socket: str) -> None:
        super().__init__(config)
        self._socket = socket

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[Any] | None = None) -> None:
        await super().startup(sockets)
        if not self.started:
            return
        if self._socket:
            url = f"unix:{self._socket}"
        else:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(json.dumps({"ready": True, "url": url, "pid": os.getpid()}), flush=True)


def engine_of(model: PreTrainedModel, options: argparse.Namespace) -> BatchEngine:
    """With the store of the daemon at `run_dir` ("": without)."""
    where = os.path.abspath(options.run_dir)  # also after a change of the working directory
    client = (lambda: connect(where, timeout_s=CONNECT_TIMEOUT_S)) if options.run_dir else None
    shard_bytes = Geometry.of(model, options.chunk_tokens).shard_bytes
    return BatchEngine(
        model,
        client,
        pool_chunks=max(1, options.pool_bytes // shard_bytes),
        chunk_tokens=options.chunk_tokens,
        sequences_max=options.sequences_max,
        prefill_tokens=options.prefill_tokens,
        waiting_max=options.waiting_max,
        retain=options.retain,
        read_buffer=options.read_buffer,
        load_ahead=options.load_ahead,
        compute_or_load=options.compute_or_load,
        weights_epoch=options.weights_epoch,
        salt=options.salt.encode(),
        truncation=truncation_of(options, model.config.max_position_embeddings),
        canary_every=options.canary_every,
    )


def truncation_of(options: argparse.Namespace, positions_max: int) -> Truncation | None:
    """`positions_max`: of the model. Raises ValueError for what cannot be."""
    if not options.truncate_tokens:
        return None
    return Truncation(
        options.truncate_tokens,
        kept_share=options.truncate_to,
        head_tokens=options.truncate_head,
        recompute_share=options.truncate_recompute,
        deviating=options.truncate_deviating,
        mass_share=options.truncate_mass,
        keep_positions=options.truncate_keep_positions,
        positions_max=positions_max if options.truncate_keep_positions else 0,
    )


def prompt_cache_of(service: Service, text: Text | None, options: argparse.Namespace) -> PromptCache | None:
    """None without a daemon, whose schemas and chunks it serves, and without a tokenizer."""
    if options.promptcache == "off" or text is None or not options.run_dir:
        return None
    where = os.path.abspath(options.run_dir)
    return PromptCache(
        service,
        text.tokenizer(),
        DaemonLibrary(lambda: connect(where, timeout_s=CONNECT_TIMEOUT_S)),
        forced=options.promptcache == "force",
        verdict_file=options.promptcache_verdict,
    )


def text_of(folder: Path, template: str) -> Text | None:
    """None for a folder without a tokenizer: then clients send token ids."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        logging.getLogger(__name__).warning("no tokenizer in %s: %s", folder, str(error).split("\n")[0])
        return None
    return Text(tokenizer, template=template)


def stop_tokens_of(model: PreTrainedModel) -> tuple[int, ...]:
    """Tokens that end an answer."""
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    end = getattr(generation, "eos_token_id", None)
    end = model.config.eos_token_id if end is None else end
    return () if end is None else tuple(end) if isinstance(end, (list, tuple)) else (int(end),)


def keys_of(path: Path) -> dict[str, str]:
    """API keys and their tenants, from lines `tenant key`. Raises ValueError, naming the line."""
    keys: dict[str, str] = {}
    for number, line in enumerate(text_in("--api-keys", path).splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split()
        if len(parts) != 2 or not TENANT.fullmatch(parts[0]):
            raise ValueError(
                f"--api-keys {path}, line {number}: must be a tenant (letters, digits, . _ -) and a key"
            )
        tenant, key = parts
        if keys.setdefault(key, tenant) != tenant:
            raise ValueError(f"--api-keys {path}, line {number}: the key of two tenants")
    if not keys:
        raise ValueError(f"--api-keys {path}: no key there")
    return keys


def text_in(option: str, path: Path) -> str:
    """What the file of an option says. Raises ValueError, naming the option."""
    try:
        return path.read_text()
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{option} {path}: is no text in UTF-8") from None


def bytes_of(value: str) -> int:
    """A size with a suffix: "4G". Raises ArgumentTypeError."""
    match = re.fullmatch(r"([0-9]{1,18})([KMGT]?)", value.strip().upper())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{value!r} is no size: a number of bytes, or as 512M or 4G")
    return int(match[1]) << SUFFIXES[match[2]]


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Of an option that takes whole numbers in these bounds."""

    def number_of(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{value!r} is no whole number") from None
        if number < least or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"between {least} and {most}"
            raise argparse.ArgumentTypeError(f"{number}: must be {bounds}")
        return number

    return number_of


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="worker",
        description=__doc__.splitlines()[0] if __doc__ else "",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder with config.json and safetensors files")
    add("--name", default="", help="what clients call the model (none: its own name)")
    add("--run-dir", default="", help="run directory of kvstored (none: nothing is stored)")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=whole(0, 65535), default=8000, help="port to listen on (0: any that is free)")
    add("--socket", default="", help="path of a unix socket to listen on instead")
    add(
        "--api-keys",
        type=Path,
        help="file of lines `tenant key`; none: no key is asked for, all are one tenant",
    )
    add("--chat-template", type=Path, help="a Jinja file, where the tokenizer's own template will not do")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of weights and KV")
    add("--pool-bytes", type=bytes_of, default="1G", help="size of the HBM pool")
    add("--retain", action=argparse.BooleanOptionalAction, default=True, help="keep idle chunks in the pool")
    add("--chunk-tokens", type=whole(1), default=CHUNK_TOKENS, help="tokens of a chunk")
    add("--sequences-max", type=whole(1), default=16, help="requests that run at a time")
    add(
        "--waiting-max",
        type=whole(1),
        default=WAITING_MAX,
        help="requests that may wait; more are answered 429",
    )
    add("--prefill-tokens", type=whole(1), default=512, help="tokens of prompts computed in a step")
    add("--load-ahead", type=whole(0), default=1, help="requests that begin to load while they wait to run")
    add(
        "--read-buffer",
        type=whole(0),
        help="layers of KV to load before a request joins a step (none: as many as keep it from waiting)",
    )
    add(
        "--compute-or-load",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute what is measured to be slower to load",
    )
    add(
        "--truncate-tokens",
        type=whole(0),
        default=0,
        help="conversations that outgrow a window of so many tokens go on without their oldest turns "
        "(0: they are refused when they outgrow the model's)",
    )
    add(
        "--truncate-to",
        type=float,
        default=0.5,
        help="share of that window that is kept when a conversation is cut",
    )
    add(
        "--truncate-head",
        type=whole(0),
        help="so many of the first tokens stay: attention sinks, or all up to a middle that is cut (none: the template "
        "and system message of a chat)",
    )
    add(
        "--truncate-recompute",
        type=float,
        default=0.0,
        help="share of what is kept that is computed anew, right behind the head",
    )
    add(
        "--truncate-deviating",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="three quarters of that share are the tokens whose KV deviates most instead",
    )
    add(
        "--truncate-mass",
        type=float,
        default=0.0,
        help="share of what is kept that is older than the rest: what had the largest share of attention",
    )
    add(
        "--truncate-keep-positions",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="what is kept stays where it stood, with a gap, as far as the model has positions",
    )
    add(
        "--canary-every",
        type=whole(0),
        default=1000,
        help="of so many hits one is computed again and compared with what was stored (0: none)",
    )
    add("--weights-epoch", type=whole(0), default=0, help="of the namespace")
    add(
        "--promptcache",
        choices=("verified", "force", "off"),
        default="verified",
        help="prompts of modules: once `kvctl promptcache verify` has passed, at once, or never",
    )
    add("--promptcache-verdict", type=Path, help="file that keeps what verify found (none: until the end)")
    add("--salt", default="", help="of the namespace: workers with different ones share nothing")
    add("--threads", type=whole(0), default=0, help="threads that compute (0: as torch chooses)")
    add("--drain-s", type=whole(0), default=30, help="seconds that requests have to end after SIGTERM")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="warning")
    return parser


if __name__ == "__main__":
    main()
