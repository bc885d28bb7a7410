"""The worker's process once its options are known: the model, its engine, and HTTP in front of it."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from kvstore.client import connect
from kvstore.errors import Unsupported
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.layout import Geometry, model_name
from kvstore.gpu_worker.promptcache.prompts import DaemonLibrary
from kvstore.gpu_worker.promptcache.service import PromptCache
from kvstore.gpu_worker.serve.api import Api
from kvstore.gpu_worker.serve.connection import Connection
from kvstore.gpu_worker.serve.metrics import Metrics
from kvstore.gpu_worker.serve.service import Service
from kvstore.gpu_worker.serve.text import Text
from kvstore.gpu_worker.truncation import Truncation

CONNECT_TIMEOUT_S = 5.0
CONNECTIONS_TO_SPARE = 256
"""Beside those of requests that run or wait: more are answered 503."""


class Unfit(Exception):
    """The model, or what is wanted of it, is nothing for this engine."""


def serve(options: argparse.Namespace, *, keys: Mapping[str, str] | None, template: str) -> None:
    """Until it is ended. Raises Unfit."""
    if options.threads:
        torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    try:
        engine = engine_of(model, options)
    except (ValueError, Unsupported) as error:
        raise Unfit(str(error)) from None
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
