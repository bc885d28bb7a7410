"""Clients in the documents, as they are pasted: proto/README.md's knows the sockets and the stubs, and nothing of our
library; docs/asyncio.md's is the awaitable one, docs/schedulers.md's a gateway."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.client import connect
from kvstore.layout import GroupSpec, NamespaceSpec

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "proto" / "README.md"


def example(page: Path = README) -> str:
    """The page's first; docs/schedulers.md has more."""
    found = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(found) == (4 if page.name == "schedulers.md" else 1)
    return str(found[0])


def run(run_dir: Path, page: Path = README) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-c", example(page), str(run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", check=False)


def test_the_minimal_client_runs_as_pasted(start_daemon, run_dir):
    start_daemon()
    # Others have slots already: that of the example is not the first of its segment, in whose header all cells count.
    group = GroupSpec("kv", 1 << 20)
    spec = NamespaceSpec(
        "my-model",
        b"digest of its weights",
        "my-engine/k,v:[H,T,D]:float16",
        64,
        (group,),
        hash_protocol="my-keys.v1",
    )
    with connect(str(run_dir)) as client, client.open(spec).write([b"a", b"b", b"c"]) as batch:
        for number in batch.granted:
            batch.copy_from(number, bytes(1 << 20))
        assert batch.commit().ok
    for _ in range(2):  # the second time all is there already
        ended = run(run_dir)
        assert (ended.stdout.splitlines(), ended.stderr) == (
            ["saved 1048576 bytes", "loaded 1048576 bytes", "put and got 1048576 bytes"],
            "",
        )


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (README, ["saved 1048576 bytes", "loaded 1048576 bytes", "put and got 1048576 bytes"]),
        (ROOT / "docs" / "asyncio.md", ["4 chunks loaded", "ACCEPTED"]),
    ],
    ids=["proto", "asyncio"],
)
def test_what_is_on_ssd_alone_after_a_restart_is_loaded(start_daemon, run_dir, tmp_path, page, says):
    settings = {"ssd_dir": tmp_path / "ssd", "ssd_bytes": 256 << 20, "ssd_slab_bytes": 32 << 20}
    daemon = start_daemon(**settings, drain_ms=20_000)
    assert run(run_dir, page).stdout.splitlines() == says
    assert daemon.stop() == 0
    start_daemon(**settings)
    ended = run(run_dir, page)
    assert (ended.stdout.splitlines(), ended.stderr) == (says, "")


def test_the_minimal_client_says_why_it_is_refused(start_daemon, run_dir):
    start_daemon(protection="group")
    ended = run(run_dir)
    assert ended.returncode == 1 and "workers write in place here" in ended.stderr


def test_it_needs_the_stubs_alone():
    imported = set(re.findall(r"^(?:import|from) ([\w., ]+?)(?: import|$)", example(), re.MULTILINE))
    assert {name for name in imported if name.startswith("kvstore")} == {"kvstore.v1"}


@pytest.mark.parametrize("name", ["kvstored.sock", "stream.sock", "grpc.sock"])
def test_the_sockets_are_those_that_it_names(start_daemon, run_dir, name):
    start_daemon()
    assert (run_dir / name).is_socket()
    assert f"| `{name}` |" in README.read_text()


def test_the_awaitable_client_runs_as_pasted(start_daemon, run_dir):
    start_daemon()
    for _ in range(2):
        ended = run(run_dir, ROOT / "docs" / "asyncio.md")
        assert (ended.stdout.splitlines(), ended.stderr) == (["4 chunks loaded", "ACCEPTED"], "")


@pytest.mark.parametrize(
    ("number", "said"),
    [(0, "answering chat 7"), (1, str([f"answered chat {number}" for number in range(4)]))],
)
def test_threads_and_the_gateway_of_schedulers_run_as_pasted(number, said, start_daemon, run_dir):
    """What comes after them needs Redis or Ray."""
    start_daemon()
    page = (ROOT / "docs" / "schedulers.md").read_text()
    text = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[number]
    command = [sys.executable, "-P", "-c", text.replace('"/tmp/kv"', repr(str(run_dir))), str(run_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", check=False)
    assert (ended.stdout, ended.stderr) == (f"{said}\n", "")


@pytest.mark.parametrize("first", ["README.md", "docs/asyncio.md"])
def test_the_pages_follow_each_other_on_one_daemon(first, start_daemon, run_dir):
    """They have namespaces of one model name, each another, and a hint reaches its own."""
    start_daemon(dram_bytes="64M")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (readme,) = (block for block in blocks if "publish_queue" in block)
    pages = {
        "README.md": (readme.replace('"/tmp/kv"', repr(str(run_dir))), ["['ACCEPTED', 'ACCEPTED']"]),
        "docs/asyncio.md": (example(ROOT / "docs" / "asyncio.md"), ["4 chunks loaded", "ACCEPTED"]),
        "proto/README.md": (
            example(),
            ["saved 1048576 bytes", "loaded 1048576 bytes", "put and got 1048576 bytes"],
        ),
    }
    others = [name for name in pages if name != first]
    for name in (first, *others, first):
        text, said = pages[name]
        command = [sys.executable, "-P", "-c", text, str(run_dir)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", check=False)
        assert (name, ended.stdout.splitlines(), ended.stderr) == (name, said, "")
