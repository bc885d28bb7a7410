"""The worker's options, and the files that they name. What is wrong with them is said before torch is loaded, which
takes seconds."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from kvstore.gpu_worker.defaults import CHUNK_TOKENS, WAITING_MAX
from kvstore.option_types import whole

SUFFIXES = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")


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


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="worker",
        description="A worker process: one model, one engine, many clients over HTTP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
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
    return result
