"""Asks a worker a prompt of modules twice: the second time its modules come out of the store.

python examples/promptcache/ask.py http://127.0.0.1:8000 examples/promptcache/travel_prompt.xml
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ENCODED_S = 60.0


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        found: dict[str, Any] = json.load(response)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("url", metavar="URL", help="of the worker, as http://127.0.0.1:8000")
    parser.add_argument("prompt", metavar="FILE", type=Path, help="the prompt")
    options = parser.parse_args()
    try:
        ask(options.url.rstrip("/"), options.prompt.read_text())
    except urllib.error.HTTPError as error:  # the worker says why
        print(f"{options.url} refused: {error.code} {error.read().decode()}", file=sys.stderr)
        return 1
    except (OSError, ValueError, http.client.HTTPException) as error:
        print(f"{options.url} {options.prompt}: {error}", file=sys.stderr)
        return 1
    return 0


def ask(url: str, prompt: str) -> None:
    body = {"pml": prompt, "max_tokens": 24, "temperature": 0}
    for number in range(2):
        answer = call(f"{url}/v1/chat/completions", body)
        said, usage = answer["kvstore"], answer["usage"]
        print(
            f"{said['promptcache']['schema']}: {usage['prompt_tokens']} tokens, of which "
            f"{usage['prompt_tokens_details']['cached_tokens']} were not computed; first token after "
            f"{1000 * said['ttft_s']:.0f} ms: {answer['choices'][0]['message']['content']!r}"
        )
        if number == 0:
            deadline = time.monotonic() + ENCODED_S
            while call(f"{url}/promptcache")["waiting"] and time.monotonic() < deadline:
                time.sleep(0.1)
            call(f"{url}/flush", {"timeout_s": ENCODED_S})


if __name__ == "__main__":
    sys.exit(main())
