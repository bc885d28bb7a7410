"""What `make test-deploy` asks of real tools: helm, Kubernetes' schemas, promtool. Without them tests are skipped."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore import config
from kvstore.__main__ import configuration

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm/attnstore"
ALERTS = CHART / "alerts.yaml"
PAGE = DEPLOY.parent / "docs/kubernetes.md"
FLEET = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])
"""The values of the page."""
OURS = {"DaemonSet", "ConfigMap", "ServiceAccount", "NetworkPolicy"}
EVERYTHING = {
    "settings": {
        **{"dram_bytes": "8G", "segment_bytes": 1 << 30, "prefetch_share_max": 0.5, "huge_pages": False},
        "tcp_address": "0.0.0.0:7070",
        "kv_events_endpoint": "tcp://0.0.0.0:5557",
        "dram_quotas": {"alice": "8G", "*": 1 << 31},
    },
    "extraEnv": [{"name": "AWS_REGION", "value": "eu-1"}],
    "extraVolumes": [{"name": "nfs", "nfs": {"server": "nas", "path": "/kv"}}],
    "extraVolumeMounts": [{"name": "nfs", "mountPath": "/mnt/kv"}],
    "tenants": {"1000": 'alice "a" \\ '},
    "ssd": {"enabled": True, "bytes": 1 << 40},
    "accessSecret": "access",
    "tlsSecret": "tls",
    "metrics": {"podMonitor": True, "prometheusRule": True},
    "networkPolicy": {
        **{"tcpFrom": [{"podSelector": {}}], "eventsFrom": [{"podSelector": {}}]},
        "egress": [{"ports": [{"port": 6379}]}],
    },
    "nodeSelector": {"gpu": "true"},
    "priorityClassName": "system-node-critical",
    "imagePullSecrets": [{"name": "registry"}],
    "podAnnotations": {"team": "inference"},
}


def tool(name: str) -> str:
    found = os.environ.get(name.upper().replace("-", "_")) or shutil.which(name)
    if not found:
        pytest.skip(f"no {name} here: make test-deploy brings it")
    return found


def rendered(tmp_path: Path, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By kind."""
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    command = [tool("helm"), "template", "kv", str(CHART), "--values", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (tmp_path / "rendered.yaml").write_text(text)
    return {item["kind"]: item for item in yaml.safe_load_all(text) if item}


def refused(tmp_path: Path, values: dict[str, Any]) -> str:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    command = [tool("helm"), "template", "kv", str(CHART), "--values", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    return ended.stderr


def test_the_chart_has_no_faults() -> None:
    subprocess.run([tool("helm"), "lint", "--strict", str(CHART)], check=True)


@pytest.mark.parametrize("values", [{}, EVERYTHING, FLEET], ids=["defaults", "everything", "fleet"])
def test_what_the_chart_makes_fits_the_schemas_of_kubernetes(tmp_path: Path, values: dict[str, Any]) -> None:
    made = rendered(tmp_path, values)
    assert made.keys() >= OURS
    mine = tmp_path / "ours.yaml"
    mine.write_text(yaml.safe_dump_all([item for kind, item in made.items() if kind in OURS]))
    for file in (mine, DEPLOY / "sidecar.yaml"):
        subprocess.run([tool("kubernetes-validate"), "--strict", str(file)], check=True)


def test_the_settings_that_the_chart_writes_are_read_by_the_daemon(tmp_path: Path) -> None:
    made = rendered(tmp_path, EVERYTHING)
    file = tmp_path / "kvstored.toml"
    file.write_text(made["ConfigMap"]["data"]["kvstored.toml"])
    program = "import sys; from kvstore.__main__ import configuration; print(configuration(sys.argv[1:], {}))"
    command = [sys.executable, "-P", "-c", program, f"--config={file}"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for setting in (
        *("dram_bytes=8589934592", "segment_bytes=1073741824", "prefetch_share_max=0.5", "huge_pages=False"),
        *("tcp_address='0.0.0.0:7070'", "ssd_bytes=1099511627776", "run_dir='/run/kvstored'"),
        *("metrics_port=9464", "metrics_host='0.0.0.0'", "access_file='/etc/kvstored-access/access.toml'"),
        "dram_quotas={'*': 2147483648, 'alice': 8589934592}",
        """tenants={'1000': 'alice "a" \\\\ '}""",
    ):
        assert setting in told, setting


def test_nodes_of_a_fleet_find_secrets_names_and_each_other(tmp_path: Path) -> None:
    made = rendered(tmp_path, FLEET)
    file = tmp_path / "kvstored.toml"
    file.write_text(made["ConfigMap"]["data"]["kvstored.toml"])
    (container,) = made["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    variables = {item["name"]: item.get("value", "redis://registry:6379/0") for item in container["env"]}
    assert container["envFrom"] == FLEET["extraEnvFrom"]
    source = {item["name"]: item.get("valueFrom") for item in container["env"]}
    assert source["KVSTORED_NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert source["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert variables["KVSTORED_PEER_ADVERTISE"] == "$(POD_IP):7071"
    variables |= {"KVSTORED_NODE_NAME": "gpu-07", "KVSTORED_PEER_ADVERTISE": "10.0.0.7:7071"}
    settings = configuration([f"--config={file}"], variables)
    assert settings.node_name == "gpu-07" and settings.peer_advertise == "10.0.0.7:7071"
    places = [mount["mountPath"] for mount in container["volumeMounts"]]
    files = [value for name, value in FLEET["settings"].items() if str(value).startswith("/")]
    assert len(files) == 6 and all(str(Path(path).parent) in places for path in files)
    policy = made["NetworkPolicy"]["spec"]
    others = [{"podSelector": policy["podSelector"]}]
    assert {"from": others, "ports": [{"port": 7071}]} in policy["ingress"]
    assert policy["egress"] == [{"to": others, "ports": [{"port": 7071}]}, *FLEET["networkPolicy"]["egress"]]


def test_a_changed_setting_starts_the_daemons_anew(tmp_path: Path) -> None:
    def digest(values: dict[str, Any]) -> str:
        made = rendered(tmp_path, values)
        return made["DaemonSet"]["spec"]["template"]["metadata"]["annotations"]["checksum/config"]

    assert digest({}) == digest({"nodeSelector": {"gpu": "true"}})
    assert digest({}) != digest({"settings": {"dram_bytes": "8G"}})


def test_the_container_has_no_rights_that_it_does_not_need(tmp_path: Path) -> None:
    pod = rendered(tmp_path, EVERYTHING)["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["hostPID"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"settings": {"run_dir": "/tmp"}}, "run_dir"),
        ({"settings": {"tcp_address": "0.0.0.0:7070"}}, "needs accessSecret"),
        ({"tenants": {"alice": "1000"}}, "alice"),
        ({"ssd": {"path": "/x"}}, "path"),
        ({"metrics": {"port": 70_000}}, "port"),
        ({"extraSecrets": ["a/b"]}, "extraSecrets"),
        ({"extraEnv": [{"value": "x"}]}, "name"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(
    tmp_path: Path, values: dict[str, Any], why: str
) -> None:
    assert why in refused(tmp_path, values)


def test_the_rules_are_rules_and_fire_when_they_should(tmp_path: Path) -> None:
    promtool = tool("promtool")
    subprocess.run([promtool, "check", "rules", str(ALERTS)], check=True)
    series = [
        ('up{job="kvstored",instance="a"}', "0x30"),
        ('up{job="kvstored",instance="b"}', "1x30"),
        ('kvstored_uptime_seconds{instance="a"}', "100 1 61 1 61 1 61 121x20"),
        ('kvstored_ssd_state{instance="a",state="off"}', "1x30"),
        ('kvstored_ssd_state{instance="b",state="read_only"}', "1x30"),
        ('kvstored_ssd_errors_total{instance="a",kind="corrupt"}', "0x10 1x20"),
        ('kvstored_ssd_problems{instance="a"}', "2x30"),
        ('kvstored_slots{instance="a",namespace="1",state="quarantined"}', "1x100"),
        ('kvstored_slots{instance="b",namespace="1",state="quarantined"}', "0x100"),
        ('kvstored_tcp_refused{instance="a"}', "0+20x30"),
        ('kvstored_prefetch_total{instance="a",result="late"}', "0+60x100"),
        ('kvstored_prefetch_total{instance="a",result="on_time"}', "0+60x100"),
        ('kvstored_prefetch_total{instance="b",result="on_time"}', "0+60x100"),
        ('kvstored_source_remote_well{instance="a"}', "1x100"),
        ('kvstored_source_remote_well{instance="b"}', "0x100"),
        ('kvstored_source_remote_well{instance="c"}', "1x100"),
        ('kvstored_source_peers_well{instance="c"}', "0x100"),
        ('kvstored_remote_forgets_read_ms_ago{instance="a"}', "900x100"),
        ('kvstored_remote_forgets_read_ms_ago{instance="b"}', "0+60000x100"),
        ('kvstored_remote_forgets_read_ms_ago{instance="c"}', "900x100"),
        ('kvstored_peers_forgets_read_ms_ago{instance="c"}', "0+60000x100"),
        ('kvstored_remote_forgets_waiting{instance="a"}', "0x100"),
        ('kvstored_remote_forgets_waiting{instance="b"}', "1x100"),
        ('kvstored_registry_ok{instance="a"}', "0x100"),
    ]
    firing = {
        "KvstoredDown": ("5m", ["a"]),
        "KvstoredRestarting": ("20m", ["a"]),
        "KvstoredSsdOff": ("5m", ["a"]),
        "KvstoredSsdReadOnly": ("10m", ["b"]),
        "KvstoredCorruptRecords": ("20m", ["a"]),
        "KvstoredSsdProblems": ("15m", ["a"]),
        "KvstoredSlotsQuarantined": ("40m", ["a"]),
        "KvstoredStrangersRefused": ("20m", ["a"]),
        "KvstoredPrefetchesLate": ("60m", ["a"]),
        "KvstoredBeyondLeftAlone": ("15m", ["b", "c"]),
        "KvstoredForgetsUnread": ("15m", ["b", "c"]),
        "KvstoredForgetsUntold": ("15m", ["b"]),
        "KvstoredRegistryAway": ("15m", ["a"]),
        "KvstoredNotDurable": ("20m", []),
    }
    # Which alerts fire, and for whom; labels and texts are not compared.
    checks = [
        {
            "expr": f'count by (instance) (ALERTS{{alertname="{name}",alertstate="firing"}})',
            "eval_time": at,
            "exp_samples": [{"labels": f'{{instance="{one}"}}', "value": 1} for one in instances],
        }
        for name, (at, instances) in firing.items()
    ]
    file = tmp_path / "test.yaml"
    tests = {
        "rule_files": [str(ALERTS)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series],
                "promql_expr_test": checks,
            }
        ],
    }
    file.write_text(yaml.safe_dump(tests))
    ended = subprocess.run(
        [promtool, "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_settings_of_compose_are_the_daemons() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    known = {f"--{name.replace('_', '-')}" for name in config.StoreConfig.__dataclass_fields__}
    assert {option.split("=")[0] for option in services["kvstored"]["command"]} <= known
