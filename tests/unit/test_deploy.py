"""What an operator copies from deploy/ says what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from kvstore import config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_the_annotated_settings_are_the_defaults() -> None:
    text = (DEPLOY / "kvstored.toml").read_text()
    assert config.load(tomllib.loads(text), {}, {}) == config.StoreConfig()
    values = tomllib.loads(re.sub(r"^#(?=\w+ = )", "", text, flags=re.MULTILINE))
    assert set(values) == {item.name for item in fields(config.StoreConfig)}
    assert config.load(values, {}, {}) == config.StoreConfig()


@pytest.mark.parametrize("size", ["512M", "2560M", "6G"])
def test_another_size_of_the_arena_needs_no_other_line(size: str) -> None:
    text = (DEPLOY / "kvstored.toml").read_text()
    changed = text.replace('dram_bytes = "4G"', f'dram_bytes = "{size}"')
    assert changed != text
    assert config.load(tomllib.loads(changed), {}, {}).dram_bytes % (1 << 20) == 0


def test_every_setting_is_explained_in_the_file() -> None:
    lines = (DEPLOY / "kvstored.toml").read_text().splitlines()
    for index, line in enumerate(lines):
        if line and not line.startswith(("#", "[")):
            above = lines[index - 1]
            explained = above.startswith("# ") or "=" in above  # one comment may explain two lines
            assert explained, f"line {index + 1}: {line}"


def test_the_unit_starts_the_daemon_with_that_file_and_waits_until_it_is_ready() -> None:
    unit = (DEPLOY / "kvstored.service").read_text()
    assert "ExecStart=/opt/attnstore/bin/kvstored --config /etc/kvstored/kvstored.toml" in unit
    assert "Type=notify" in unit and "RuntimeDirectory=kvstored" in unit


def test_the_unit_is_not_restarted_for_settings_that_cannot_work() -> None:
    command = [sys.executable, "-P", "-m", "kvstore", "--dram-bytes=lots"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "dram_bytes=lots" in ended.stderr
    lines = (DEPLOY / "kvstored.service").read_text().splitlines()
    assert f"RestartPreventExitStatus={ended.returncode}" in lines


def test_the_image_has_every_extra_that_a_setting_of_the_daemon_can_ask_for() -> None:
    parts = ("server", "fleet", "tiers", "transport", "core")
    sources = [path for part in parts for path in (DEPLOY.parent / "kvstore" / part).rglob("*.py")]
    sources.append(DEPLOY.parent / "kvstore/__main__.py")
    wanted = {name for path in sources for name in re.findall(r"attnstore\[(\w+)\]", path.read_text())}
    assert wanted >= {"daemon", "remote", "fleet", "encryption", "events", "identity"}
    (installed,) = re.findall(r'"\$2\[([\w,]+)\]"', (DEPLOY / "install.sh").read_text())
    assert wanted == set(installed.split(","))
    assert "RUN sh /src/deploy/install.sh /opt/attnstore /src\n" in (DEPLOY / "Dockerfile").read_text()


def test_what_is_sent_to_docker_is_what_the_image_is_made_of() -> None:
    lines = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    sent = [line[1:] for line in lines if line.startswith("!")]
    (copied,) = re.findall(r"cp -r (.*) \$\(INTO\)/source", (DEPLOY.parent / "Makefile").read_text())
    assert {*copied.split(), "deploy/install.sh"} == set(sent)
    assert all((DEPLOY.parent / name).exists() for name in sent)


def test_every_page_and_manifest_names_one_image() -> None:
    chart = (DEPLOY / "helm/attnstore/Chart.yaml").read_text()
    (version,) = re.findall(r'appVersion: "(.*)"', chart)
    pages = ("Dockerfile", "compose.yaml", "sidecar.yaml", "../docs/kubernetes.md")
    for page in pages:
        tags = set(re.findall(r"(?:image: |-t |example/)attnstore(:\S+)?", (DEPLOY / page).read_text()))
        assert tags - {""} == {f":{version}"}, page
