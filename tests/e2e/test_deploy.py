"""Dashboard, alerts and runbook name what the daemon exports, and each other."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ALERTS = DEPLOY / "helm/attnstore/alerts.yaml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
PANELS = json.loads((DEPLOY / "grafana/dashboard.json").read_text())["panels"]
METRIC = re.compile(r"\bkvstored_\w+")


def test_what_alerts_and_dashboard_ask_for_is_exported(start_daemon, tmp_path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    secret = tmp_path / "secret"
    secret.write_text("5" * 64)
    secret.chmod(0o600)
    settings = {
        **{"ssd_dir": tmp_path / "ssd", "ssd_bytes": "64M", "ssd_slab_bytes": "4M"},
        **{"remote_url": f"file://{tmp_path}/shared", "node_name": "a", "fleet_secret_file": secret},
        **{"dram_quotas": "*=1G", "ssd_quotas": "*=1G"},
        **{"registry_url": "redis://127.0.0.1:1/0", "peer_address": "127.0.0.1:0", "peer_plaintext": True},
    }
    start_daemon(metrics_port=port, **settings)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        exported = set(re.findall(r"^# TYPE (\w+)", answer.read().decode(), re.MULTILINE))
    # A counter that has not counted yet is not there; these come with the first save.
    exported.add("kvstored_bytes_saved_total")
    asked = {rule["alert"]: rule["expr"] for rule in RULES}
    asked |= {panel["title"]: " ".join(t["expr"] for t in panel["targets"]) for panel in PANELS}
    missing = {name: set(METRIC.findall(expression)) - exported for name, expression in asked.items()}
    assert not {name: metrics for name, metrics in missing.items() if metrics}
    assert sum(len(METRIC.findall(expression)) for expression in asked.values()) > 40


def test_each_alert_has_a_section_in_the_runbook_and_no_section_is_of_none() -> None:
    sections = re.findall(r"^## (\w+)$", (DEPLOY / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in RULES]
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
