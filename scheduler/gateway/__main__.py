"""`python -m kvstore.scheduler.gateway`: see the package."""

from __future__ import annotations

import argparse
import logging
from urllib.parse import urlsplit

from kvstore.option_types import whole
from kvstore.startup import end_at_interrupt, loading


def _server(text: str) -> tuple[str, str]:
    url, _, node = text.partition("=")
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        is_address = (
            parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and url.isprintable()
        )
    except ValueError:  # such a port, or such a host, cannot be
        is_address = False
    if not is_address:
        raise argparse.ArgumentTypeError(f"{url} is no address of a server (as http://127.0.0.1:8000)")
    return url, node


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvstore.scheduler.gateway")
    parser.add_argument(
        "--server",
        type=_server,
        action="append",
        required=True,
        metavar="URL[=NODE]",
        help="of a vLLM, and the node_name of its daemon where there are several; repeat",
    )
    parser.add_argument("--run-dir", default="", help="the daemon's; without it nothing is told ahead")
    parser.add_argument(
        "--model", default="", help="as in `kvctl namespaces`; default: the only one there is"
    )
    parser.add_argument("--slots", type=whole(1), default=8, help="requests a server is given at a time (8)")
    parser.add_argument("--waiting-max", type=whole(1), default=4_096)
    parser.add_argument(
        "--drain-s", type=whole(1), default=30, help="seconds that requests have to end after SIGTERM (30)"
    )
    parser.add_argument(
        "--silent-s",
        type=whole(1),
        default=600,
        help="seconds after which an answer of which nothing comes is given up (600)",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=whole(0, 65_535), default=8080)
    options = parser.parse_args()
    nodes = tuple(node for _, node in options.server)
    if any(nodes) and not (all(nodes) and options.run_dir):
        parser.error("name the node of each --server, and a --run-dir of any of them")
    end_at_interrupt()  # until it serves, and catches signals
    # Now, as that takes a second: --help and a wrong option are answered before.
    with loading("the gateway", extra="gateway"):
        from kvstore.scheduler.gateway.app import Settings
        from kvstore.scheduler.gateway.process import serve
    logging.basicConfig(level=logging.INFO, format="gateway: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each question whether a server is well
    settings = Settings(
        tuple(url for url, _ in options.server),
        options.run_dir,
        options.model,
        options.slots,
        options.waiting_max,
        silent_s=options.silent_s,
        nodes=nodes if any(nodes) else (),
    )
    serve(settings, host=options.host, port=options.port, drain_s=options.drain_s)


if __name__ == "__main__":
    main()
