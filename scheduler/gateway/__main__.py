"""`python -m kvstore.scheduler.gateway`: see the package."""

from __future__ import annotations

import argparse
import logging

import uvicorn

from kvstore.scheduler.gateway.app import Settings, create_app


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvstore.scheduler.gateway")
    parser.add_argument("--server", action="append", required=True, metavar="URL", help="of a vLLM; repeat")
    parser.add_argument("--run-dir", default="", help="the daemon's; without it nothing is told ahead")
    parser.add_argument(
        "--model", default="", help="as in `kvctl namespaces`; default: the only one there is"
    )
    parser.add_argument("--slots", type=int, default=8, help="requests a server is given at a time (8)")
    parser.add_argument("--waiting-max", type=int, default=4_096)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    settings = Settings(
        tuple(options.server), options.run_dir, options.model, options.slots, options.waiting_max
    )
    uvicorn.run(create_app(settings), host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
