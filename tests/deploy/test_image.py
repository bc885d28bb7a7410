"""What the image has of ours, as deploy/install.sh makes it: `make image-size`. The rest is a slim Debian with
Python, some 105 to 125 MB, so that the whole stays below 250."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

OURS_BYTES_MAX = 125_000_000
LIBRARIES = "redis hiredis obstore zmq msgspec cryptography jwt lmdb uvloop prometheus_client grpc_health"


@pytest.fixture
def image() -> Path:
    folder = os.environ.get("IMAGE")
    if not folder:
        pytest.skip("no IMAGE: make image-size makes it")
    return Path(folder)


def test_it_is_small(image: Path) -> None:
    sizes = {path: path.lstat().st_size for path in image.rglob("*") if not path.is_dir()}
    largest = sorted(sizes, key=sizes.__getitem__)[-5:]
    assert sum(sizes.values()) <= OURS_BYTES_MAX, [(str(path), sizes[path]) for path in largest]


def test_the_daemon_starts_there_with_every_library_that_settings_ask_for_and_no_torch(image: Path) -> None:
    program = (
        f"import importlib.util as u; print([n for n in '{LIBRARIES} torch'.split() if not u.find_spec(n)])"
    )
    found = subprocess.run(
        [image / "bin/python", "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "['torch']"
    program = (
        "import kvstore.server.daemon, kvstore.tiers.remote.redis_store, kvstore.tiers.remote.object_store"
    )
    subprocess.run([image / "bin/python", "-P", "-B", "-c", program], check=True)
