"""`kvctl promptcache`: schemas of Prompt Cache, and what a prompt of them is to a model."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvstore.cli.command import Command, number, run_directory, seconds
from kvstore.cli.output import note, say, say_json, write
from kvstore.cli.tables import peer_text, plain, size, table, word
from kvstore.client import Client, Namespace, connect
from kvstore.client.schemas import get_schema, list_schemas, put_schema, remove_schema
from kvstore.errors import BadRequest, NotFound, StoreError, Unavailable
from kvstore.promptcache import Encoding, Layout, Method, Schema, load_tokenizer, parse_prompt, parse_schema
from kvstore.promptcache.encoding import CHUNK_TOKENS, Entry
from kvstore.promptcache.layout import Source
from kvstore.promptcache.markup import DOCUMENT_BYTES_MAX
from kvstore.promptcache.schema import DIGEST_BYTES, text_digest
from kvstore.types import KEYS_PER_REQUEST_MAX, Outcome, Reason
from kvstore.v1 import stats_pb2, stats_pb2_grpc
from kvstore.wire import spec_from_proto

DRY_SALT = bytes(32)
"""For keys that nobody looks up."""


def _digest(text: str) -> bytes:
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) != DIGEST_BYTES:
        raise argparse.ArgumentTypeError(f"a version has {2 * DIGEST_BYTES} hexadecimal digits")
    return data


def _read(path: str, field: str = "FILE") -> bytes:
    """A file, or standard input for "-"; at most one byte more than a document may have."""
    if path == "-":
        return sys.stdin.buffer.read(DOCUMENT_BYTES_MAX + 1)
    try:
        with open(path, "rb") as file:
            return file.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as problem:
        raise BadRequest(
            f"cannot be read: {problem.strerror}",
            field=field,
            value=path,
            remedy="name a file that can be read, or -",
        ) from None


# ---------------------------------------------------------------------------------------------------------- schemas


def _put(client: Client, options: argparse.Namespace) -> int:
    refused = 0
    for path in options.files:
        try:
            reply = put_schema(client, _read(path), document=Path(path).name)
        except BadRequest as error:
            refused += 1
            note(f"kvctl: {error}")
            continue
        for line in reply.warnings:
            note(f"{path}: {peer_text(line)}")
        if options.json:
            say_json(plain(reply))
            continue
        row = reply.schema
        what = "is version" if reply.added else "is already version"
        lasting = "" if reply.durable else ", until the daemon ends: it has no SSD directory"
        say(f"{row.name} {what} {row.digest.hex()}: {row.modules} modules, {size(row.bytes)}{lasting}")
    return 1 if refused else 0


def _list(client: Client, options: argparse.Namespace) -> int:
    rows = list_schemas(client, name=options.name or "", all_versions=options.all)
    if options.json:
        say_json([plain(row) for row in rows])
        return 0
    head = ("schema", "version", "current", "modules", "size")
    say(
        table(head, [(row.name, row.digest.hex(), row.current, row.modules, size(row.bytes)) for row in rows])
    )
    return 0


def _get(client: Client, options: argparse.Namespace) -> int:
    reply = get_schema(client, options.name, digest=options.version or b"")
    if text_digest(reply.text) != reply.schema.digest:
        raise BadRequest("this is not the text that was put", field="name", value=options.name)
    write(reply.text, options.output)
    return 0


def _remove(client: Client, options: argparse.Namespace) -> int:
    removed = remove_schema(client, options.name, digest=options.version or b"")
    if options.json:
        say_json({"removed": removed})
    else:
        say(f"{removed} version{'' if removed == 1 else 's'} removed")
    if removed:
        return 0
    note(f"kvctl: {options.name}: no such schema is known here (see kvctl promptcache list)")
    return 1


def _check(options: argparse.Namespace) -> int:
    """Without a daemon."""
    refused = 0
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    for path in options.files:
        try:
            schema = parse_schema(_read(path), document=Path(path).name)
            if tokenizer is not None:
                Layout(schema, tokenizer, document=schema.name)  # scaffolds fit in their lengths
        except BadRequest as error:
            refused += 1
            note(f"kvctl: {error}")
            continue
        for line in schema.warnings:
            note(f"{path}: {line}")
        modules = [path for path, _ in schema.modules]
        if options.json:
            say_json({"schema": schema.name, "modules": ["/".join(one) for one in modules]})
        else:
            say(f"{schema.name}: {len(modules)} modules, version {schema.digest.hex()}")
    return 1 if refused else 0


# ----------------------------------------------------------------------------------------------------------- render


def _render(client: Client | None, options: argparse.Namespace) -> int:
    found: dict[str, Schema] = {}
    if options.schema:
        schema = parse_schema(_read(options.schema, "--schema"), document=Path(options.schema).name)
        found[schema.name] = schema

    def find(name: str) -> Schema | None:
        if client is None and name not in found:
            raise BadRequest(
                f"is schema {', '.join(found)}, and the prompt is of schema {name[:80]}",
                field="--schema",
                value=options.schema,
                remedy=f"name the file of schema {name[:80]}, or leave --schema away for the daemon's",
            )
        if client is not None and name not in found:
            try:
                found[name] = parse_schema(get_schema(client, name).text, document=name)
            except NotFound:
                return None
        return found.get(name)

    prompt = parse_prompt(_read(options.prompt), find, document=Path(options.prompt).name)
    for line in (*prompt.schema.warnings, *prompt.warnings):
        note(line)
    tokenizer = load_tokenizer(options.tokenizer)
    layout = Layout(prompt.schema, tokenizer, document=prompt.schema.name)
    placement = layout.place(prompt, close_gaps=options.close_gaps)
    namespace = _namespace(client, options.namespace) if client is not None and options.namespace else None
    encoding = Encoding(
        layout,
        namespace.salt if namespace is not None else DRY_SALT,
        chunk_tokens=namespace.spec.chunk_tokens if namespace is not None else CHUNK_TOKENS,
        method=Method(options.method),
    )
    entries = {run.position: some for run, some in encoding.entries(placement)}
    hits = _hits(namespace, [entry for some in entries.values() for entry in some])
    rows: list[dict[str, Any]] = []
    for run in placement.runs:
        chunks = entries.get(run.position, ()) if run.source is Source.STORED else ()
        rows.append(
            {
                "source": run.source.value,
                "module": "/".join(run.path),
                "parameter": run.parameter,
                "tokens": len(run.tokens),
                "first": run.position,
                "last": run.end - 1,
                "moved": chunks[0].delta if run.document and chunks else run.delta,
                "chunks": len(chunks),
                "hits": [hits[entry.chunk.key] for entry in chunks] if namespace is not None else None,
                "token_ids": list(run.tokens),
            }
        )
    if options.json:
        say_json({"schema": prompt.schema.name, "reply_at": placement.end, "runs": rows})
        return 0
    say(_render_text(rows, placement.end, asked=namespace is not None, ids=options.tokens))
    return 0


def _render_text(rows: list[dict[str, Any]], end: int, *, asked: bool, ids: bool) -> str:
    head = ("source", "module", "parameter", "tokens", "positions", "moved", "chunks", "in the store")
    cells = [
        (
            row["source"],
            row["module"] or "-",
            row["parameter"] or "-",
            row["tokens"],
            f"{row['first']}-{row['last']}",
            row["moved"] or "-",
            row["chunks"] or "-",
            _found(row["hits"]),
        )
        for row in rows
    ]
    lines = [table(head, cells)]
    if ids:
        lines += [f"{row['first']}: {' '.join(map(str, row['token_ids']))}" for row in rows]
    total = sum(row["tokens"] for row in rows)
    stored = sum(row["tokens"] for row in rows if row["source"] == Source.STORED.value)
    lines.append(
        f"{total:,} tokens: {stored:,} whose KV the store can have, {total - stored:,} computed for this prompt;"
        f" the reply begins at position {end:,}"
    )
    if not asked:
        lines.append("With --namespace, it is looked up what the store has; see kvctl namespaces.")
    return "\n".join(lines)


def _found(hits: list[str] | None) -> str:
    if hits is None or not hits:
        return "-"
    there = sum(hit == "hit" for hit in hits)
    others = sorted({hit for hit in hits if hit != "hit"})
    return f"{there}/{len(hits)}" + (f" ({', '.join(others)})" if others else "")


def _namespace(client: Client, wanted: int) -> Namespace:
    reply = client.unary(stats_pb2_grpc.StatsStub, "ListNamespaces", stats_pb2.ListNamespacesRequest())
    for row in reply.namespaces:
        if row.namespace_id == wanted:
            return client.open(spec_from_proto(row.spec))
    raise NotFound(
        "there is no such namespace", field="--namespace", value=wanted, remedy="see kvctl namespaces"
    )


def _hits(namespace: Namespace | None, entries: list[Entry]) -> dict[bytes, str]:
    """By key: "hit", or why it is none now."""
    found: dict[bytes, str] = {}
    keys = list(dict.fromkeys(entry.chunk.key for entry in entries))
    for start in range(0, len(keys) if namespace is not None else 0, KEYS_PER_REQUEST_MAX):
        assert namespace is not None
        some = keys[start : start + KEYS_PER_REQUEST_MAX]
        matched = namespace.match(some)
        for key, outcome, reason in zip(some, matched.outcomes, matched.reasons, strict=True):
            found[key] = "hit" if outcome is Outcome.HIT else word(Reason, reason).replace("_", " ")
    return found


# ----------------------------------------------------------------------------------------------------------- verify

VERIFY_S = 3600.0
"""Reading some hundred answers takes a model on a CPU that long."""
ASK_S, TELL_S = 10.0, 2.0
"""How long a worker may take to say how far it is; how often it is asked."""


def _verify(options: argparse.Namespace) -> int:
    """Asks a worker, which has the model; 0: it passed, or is forced."""
    body: dict[str, Any] = {"force": options.force}
    body |= {
        name: value for name in ("kl_max", "perplexity_max") if (value := getattr(options, name)) is not None
    }
    if options.texts:
        lines = _read(options.texts).decode(errors="replace").splitlines()
        try:
            body["texts"] = [json.loads(line) for line in lines if line.strip()]
        except ValueError as problem:
            raise BadRequest(
                f"is no JSON: {problem}",
                field="--texts",
                value=options.texts,
                remedy='write a line for each: {"documents": ["..."], "question": "...", "answer": "..."}',
            ) from None
    note(f"{options.worker} computes every sample with several recipes: on a CPU that takes minutes")
    key = options.key or os.environ.get("KVSTORE_API_KEY", "")
    with _telling(options.worker, key):
        found = _ask(options.worker, "/promptcache/verify", key, body)
    recipe = found["recipe"]
    if options.json:
        say_json(found)
        return 0 if recipe or found["forced"] else 1
    head = (
        "encoded after",
        "first + deviating",
        "computed in place",
        "KL",
        "top-1",
        "perplexity",
        "full attention",
        "grows by",
        "",
    )
    rows = [
        (
            row["method"],
            f"{row['share']:.0%} + {row['deviating']:.0%}" if row["deviating"] else f"{row['share']:.0%}",
            f"{row['recomputed_share']:.1%}",
            f"{row['kl']:.4f}",
            f"{row['agreement']:.1%}",
            f"{row['perplexity']:.3f}",
            f"{row['full_perplexity']:.3f}",
            f"{row['perplexity_growth']:+.2%}",
            "passes" if row["passed"] else "too much",
        )
        for row in found["rows"]
    ]
    say(table(head, rows))
    if recipe:
        say(f"Prompts are served with {recipe['computed']} computed in place.")
    elif found["forced"]:
        say("None passes; prompts are served all the same, as it was forced.")
    else:
        say(
            "None passes: prompts of modules are refused. --kl-max and --perplexity-max allow more, --force anything."
        )
    return 0 if recipe or found["forced"] else 1


@contextmanager
def _telling(url: str, key: str) -> Iterator[None]:
    """Beside it, each sample that the worker has come to is told."""
    ended = threading.Event()

    def tell() -> None:
        told = None
        while not ended.wait(TELL_S):
            try:
                at = _ask(url, "/promptcache", key, timeout_s=ASK_S).get("measuring")
            except StoreError:
                continue  # it computes, or is away: the request itself will say so
            if at and at != told and not ended.is_set():
                told = at
                note(
                    f"{at['recipe']} (recipe {at['number']} of at most {at['recipes']}): "
                    f"sample {at['samples_done'] + 1} of {at['samples']}"
                )

    thread = threading.Thread(target=tell, name="kv-verify", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _ask(
    url: str, path: str, key: str, body: dict[str, Any] | None = None, *, timeout_s: float = VERIFY_S
) -> dict[str, Any]:
    """What a worker answers to a POST of `body`, or to a GET. Raises BadRequest and Unavailable."""
    parts = urlsplit(url)
    try:
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError("no http:// address")
        connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
    except ValueError as problem:
        raise BadRequest(
            f"is no address of a worker: {problem}",
            field="--worker",
            value=url,
            remedy="as http://127.0.0.1:8000",
        ) from None
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        if body is None:
            connection.request("GET", path, headers=headers)
        else:
            connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as problem:
        raise Unavailable(
            f"the worker at {url} does not answer: {problem}", remedy="look whether it runs"
        ) from None
    finally:
        connection.close()
    if response.status != 200:
        message = answer.get("error", {}).get("message", answer) if isinstance(answer, dict) else answer
        raise BadRequest(f"the worker answered {response.status}: {message}", field="--worker", value=url)
    return dict(answer)


# ---------------------------------------------------------------------------------------------------------- command

ACTIONS: dict[str, Callable[[Client, argparse.Namespace], int]] = {
    "put": _put,
    "list": _list,
    "get": _get,
    "remove": _remove,
}


def run(run_dir: str, options: argparse.Namespace) -> int:
    if options.action == "check":
        return _check(options)
    if options.action == "verify":
        return _verify(options)
    if options.action == "render" and options.schema and not options.namespace:
        return _render(None, options)
    with connect(run_dir, timeout_s=options.timeout) as client:
        if options.action == "render":
            return _render(client, options)
        return ACTIONS[options.action](client, options)


def _arguments(parser: argparse.ArgumentParser) -> None:
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("--run-dir", type=run_directory, metavar="DIR", help="the daemon's directory")
    common.add_argument("--timeout", type=seconds, metavar="SECONDS", help="longest wait for the daemon")
    common.add_argument("--json", action="store_true", help="for programs: JSON, bytes in hexadecimal")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, about: str) -> argparse.ArgumentParser:
        return actions.add_parser(name, help=about, description=about, parents=[common], allow_abbrev=False)

    check = add("check", "read schemas, and say what is wrong with them; needs no daemon")
    put = add("put", "store schemas: each becomes the current version of its name")
    for one in (check, put):
        one.add_argument("files", nargs="+", metavar="FILE", help="PML; - for standard input")
    check.add_argument(
        "--tokenizer", metavar="DIR", help="also count tokens: folder of a Hugging Face tokenizer, or: bytes"
    )
    listing = add("list", "the schemas that are stored")
    listing.add_argument("name", nargs="?", metavar="NAME")
    listing.add_argument("--all", action="store_true", help="earlier versions, too")
    get = add("get", "the text of a schema")
    get.add_argument("--output", metavar="FILE", help="default: standard output")
    remove = add("remove", "remove a schema, or one version of it")
    for one in (get, remove):
        one.add_argument("name", metavar="NAME")
        one.add_argument("--version", type=_digest, metavar="HEX", help="see list --all")
    verify = add(
        "verify", "measure what modules cost a worker's model in quality: it serves them once this passes"
    )
    verify.add_argument("--worker", required=True, metavar="URL", help="as http://127.0.0.1:8000")
    verify.add_argument(
        "--texts",
        metavar="FILE",
        help="JSON lines of documents, question and answer (default: built in); - for stdin",
    )
    verify.add_argument("--kl-max", type=float, metavar="NATS", help="divergence a token (default: 0.08)")
    verify.add_argument(
        "--perplexity-max", type=float, metavar="SHARE", help="growth of the perplexity (default: 0.025)"
    )
    verify.add_argument("--force", action="store_true", help="serve whatever is found")
    verify.add_argument("--key", metavar="KEY", help="the worker's API key (default: $KVSTORE_API_KEY)")
    render = add("render", "a prompt's tokens and positions, and which of them the store has")
    render.add_argument("prompt", metavar="FILE", help="PML; - for standard input")
    render.add_argument(
        "--schema", metavar="FILE", help="instead of the stored one; then no daemon is needed"
    )
    render.add_argument(
        "--tokenizer", required=True, metavar="DIR", help="folder of a Hugging Face tokenizer, or: bytes"
    )
    render.add_argument("--namespace", type=number, metavar="N", help="look up the chunks there")
    render.add_argument(
        "--method",
        choices=[method.value for method in Method],
        default=Method.BEGINNING.value,
        help="what modules are encoded after (default: %(default)s)",
    )
    render.add_argument("--close-gaps", action="store_true", help="leave no gap between positions")
    render.add_argument("--tokens", action="store_true", help="show the token ids")


COMMANDS = (
    Command(
        "promptcache",
        "schemas of Prompt Cache: check, put, list, get, remove, render, verify",
        run_alone=run,
        arguments=_arguments,
    ),
)
