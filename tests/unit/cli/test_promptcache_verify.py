"""`kvctl promptcache verify` beside a worker that takes its time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import kvctl, promptcache

AT = {
    "recipe": "beginning, nothing computed in place",
    "number": 1,
    "recipes": 6,
    "samples_done": 2,
    "samples": 7,
}
FOUND: dict[str, Any] = {"recipe": {"computed": "nothing"}, "forced": False, "rows": []}
BOUND_S = 30.0


class Worker(BaseHTTPRequestHandler):
    """Answers a measurement once it was asked twice how far it is, with the key."""

    asked: threading.Semaphore
    keys: list[str | None]

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        self.answer({"measuring": AT})
        self.asked.release()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        for _ in range(2):
            assert self.asked.acquire(timeout=BOUND_S)
        self.answer(FOUND)

    def answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Worker.asked, Worker.keys = threading.Semaphore(0), []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Worker)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_each_sample_is_told_once(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(promptcache, "TELL_S", 0.001)
    with pytest.raises(SystemExit) as ended:
        kvctl.main(["promptcache", "verify", "--worker", url, "--key", "secret"])
    assert ended.value.code == 0
    told = capsys.readouterr()
    line = "beginning, nothing computed in place (recipe 1 of at most 6): sample 3 of 7\n"
    assert told.err.count(line) == 1
    assert "Prompts are served with nothing computed in place." in told.out
    assert set(Worker.keys) == {"Bearer secret"}


def test_check_with_a_tokenizer_refuses_a_scaffold_that_is_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.xml"
    file.write_text(
        '<schema name="a"><module name="m"><param name="p" length="3" scaffold="longer"/></module></schema>'
    )
    for status, more in ((0, []), (1, ["--tokenizer", "bytes"])):
        with pytest.raises(SystemExit) as ended:
            kvctl.main(["promptcache", "check", *more, str(file)])
        assert (ended.value.code or 0) == status
    assert "the scaffold of parameter p has 6 tokens, more than its length of 3" in capsys.readouterr().err
