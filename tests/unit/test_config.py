"""Settings: where they come from, which win, and what is refused in which words."""

import asyncio
import dataclasses
import os
import subprocess
import sys

import pytest

from kvstore.__main__ import configuration, descriptions, event_loop_factory, parser, read_toml
from kvstore.config import CONFIG_VARIABLE, StoreConfig, load, parse_setting
from kvstore.errors import ConfigError

OTHERS = {
    "protection": ("group", '"group"', "group"),
    "log_level": ("debug", '"debug"', "debug"),
    "eviction": ("lru", '"lru"', "lru"),
    "copy_threads": ("3", "3", 3),
    "remote_threads": ("3", "3", 3),
    "remote_writes": ("off", '"off"', "off"),
    **dict.fromkeys(
        ("dram_quotas", "ssd_quotas", "remote_quotas"),
        ("alice=8G,*=1", '{alice = "8G", "*" = 1}', {"alice": 8 << 30, "*": 1}),
    ),
    "metrics_host": ("0.0.0.0", "'0.0.0.0'", "0.0.0.0"),
}
"""Settings that do not take just any value: as text, in TOML, and as they are."""
FIELDS = [field.name for field in dataclasses.fields(StoreConfig)]


def test_defaults_are_possible():
    assert configuration([], {}) == StoreConfig()


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_is_a_flag_a_variable_and_a_toml_key(name, tmp_path):
    """With a value that is not the default."""
    default = getattr(StoreConfig(), name)
    text, toml, value = {
        bool: (str(not default).lower(), str(not default).lower(), not default),
        int: ("4096", "4096", 4096) if "_bytes" not in name else ("8G", '"8G"', 8 << 30),
        float: ("0.75", "0.75", 0.75),
        str: ("x", '"x"', "x"),
        dict: ("7=t", '{"7" = "t"}', {"7": "t"}),
    }[type(default)]
    if name in OTHERS:
        text, toml, value = OTHERS[name]
    arguments = [f"--{name.replace('_', '-')}={text}"]
    file = tmp_path / "kvstored.toml"
    file.write_text(f"{name} = {toml}\n")
    rest = {"dram_bytes": 8 << 30} if name == "segment_bytes" else {}
    others = [f"--{key.replace('_', '-')}={number}" for key, number in rest.items()]
    assert value != default
    for made in (
        configuration([*arguments, *others], {}),
        configuration(others, {f"KVSTORED_{name.upper()}": text}),
        configuration([*others, f"--config={file}"], {}),
    ):
        assert getattr(made, name) == value


def test_every_setting_is_described():
    about = descriptions()
    assert set(FIELDS) - {"run_dir"} <= about.keys() | {"run_dir"}
    assert all(name in about for name in FIELDS)
    text = parser().format_help()
    assert "--lease-ttl-ms INT" in text and "--ssd-bytes SIZE" in text and "--ssd-dir STR" in text
    assert "--tenants UID=TENANT,..." in text and "--dram-quotas TENANT=SIZE,..." in text
    assert "Time to live of a lease" in text


def test_flags_win_over_the_environment_and_that_over_toml(tmp_path):
    file = tmp_path / "kvstored.toml"
    file.write_text("lease_ttl_ms = 1\ndrain_ms = 1\ncopy_threads = 1\n")
    environment = {
        "KVSTORED_LEASE_TTL_MS": "2",
        "KVSTORED_DRAIN_MS": "2",
        "KVSTORED_CONFIG": str(file),
        "PATH": "",
    }
    config = configuration(["--lease-ttl-ms=3"], environment)
    assert (config.lease_ttl_ms, config.drain_ms, config.copy_threads) == (3, 2, 1)


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("4k", 4096), ("4KiB", 4096), ("2M", 2 << 20), ("1g", 1 << 30), ("1T", 1 << 40)],
)
def test_sizes(text, value):
    assert parse_setting("dram_bytes", text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dram_bytes", "4x"),
        ("dram_bytes", ""),
        ("lease_ttl_ms", "4k"),
        ("prefault", "maybe"),
        ("pin_share_max", "half"),
    ],
)
def test_what_is_no_value(name, text):
    with pytest.raises(ConfigError, match=f"{name}={text}: is not " if text else f"{name}: is not "):
        parse_setting(name, text)


def test_a_switch_may_stand_alone():
    assert configuration(["--tcp-unauthenticated"], {}).tcp_unauthenticated
    assert not configuration(["--prefault=no"], {}).prefault


@pytest.mark.parametrize(
    ("dram", "segments", "each"),
    [
        ("4G", 4, "1G"),
        ("64G", 64, "1G"),
        ("1G", 4, "256M"),
        ("256M", 4, "64M"),
        ("1536M", 6, "256M"),
        ("96M", 3, "32M"),
        ("32M", 1, "32M"),
    ],
)
def test_segments_are_made_to_fit_unless_their_size_is_named(dram, segments, each):
    """`--dram-bytes 256M` alone starts a daemon, which serves more than one model."""
    config = configuration([f"--dram-bytes={dram}"], {})
    assert config.segment_bytes == parse_setting("segment_bytes", each)
    assert config.limits.segment_count == segments


@pytest.mark.parametrize("source", ["flag", "variable", "file"])
def test_a_size_of_segments_that_is_named_stays(source, tmp_path):
    arguments, environment = ["--dram-bytes=1G"], {}
    if source == "flag":
        arguments.append("--segment-bytes=1G")
    elif source == "variable":
        environment["KVSTORED_SEGMENT_BYTES"] = "1G"
    else:
        (tmp_path / "toml").write_text('segment_bytes = "1G"\n')
        arguments.append(f"--config={tmp_path / 'toml'}")
    assert configuration(arguments, environment).segment_bytes == 1 << 30


@pytest.mark.parametrize(
    ("arguments", "environment", "why"),
    [
        (["--zzz"], {}, r"unrecognized arguments: --zzz \(kvstored --help lists all settings\)"),
        (["--dram-byte=1G"], {}, r"arguments: --dram-byte=1G \(did you mean --dram-bytes or "),
        (["--run-dir="], {}, r"run_dir: is empty \(name a directory"),
        (["--dram"], {}, "unrecognized arguments: --dram"),
        (["stray"], {}, "unrecognized arguments: stray"),
        (["--dram-bytes"], {}, "argument --dram-bytes: expected one argument"),
        ([], {"KVSTORED_NONSENSE": "1"}, "nonsense=1: no such setting"),
        ([], {"KVSTORED_DRAIN_MS": "soon"}, "drain_ms=soon: is not a whole number"),
        ([], {"KVSTORED_FAST_LANE": "maybe"}, "fast_lane=maybe: is not true or false"),
        (
            ["--dram-bytes=1000M", "--segment-bytes=256M"],
            {},
            r"dram_bytes=1048576000: must be .* of 268435456 bytes \(give 805306368, or another segment_bytes\)",
        ),
        (["--dram-bytes=0"], {}, "dram_bytes=0: must be above 0"),
        (["--dram-bytes=16M"], {}, "dram_bytes=16777216: is smaller than one segment of 33554432 bytes"),
        (["--tenants", "alice"], {}, "tenants=alice: is not tenants by user id: 1000=alice"),
        (["--tenants", "bob=alice"], {}, r"tenants=bob=alice: .* \(write 1000=alice; `id -u USER` prints"),
        (["--dram-quotas", "alice"], {}, r"dram_quotas=alice: is not sizes by tenant: alice=8G,\*=2G"),
        (["--ssd-quotas", "alice=much"], {}, "ssd_quotas=alice=much: is not sizes by tenant"),
        (["--remote-quotas", "*=0"], {}, r"remote_quotas=\*=0: maps the name of a tenant to a size above 0"),
        (
            ["--ssd-bytes", "much"],
            {},
            r"ssd_bytes=much: is not a size \(bytes, or a whole number with K, M, G or T",
        ),
        (
            [],
            {"KVSTORED_CONFIG": "/nowhere"},
            r"config=/nowhere: cannot be read: No such file or directory \(name a file that the user who runs",
        ),
        ([], {"KVSTORED_DRAM_BYTE": "1G"}, r"dram_byte=1G: no such setting \(did you mean dram_bytes or "),
        ([], {"KVSTORED_QQQQ": "1"}, r"qqqq=1: no such setting \(kvstored --help lists all settings\)"),
    ],
)
def test_what_is_refused(arguments, environment, why):
    with pytest.raises(ConfigError, match=why):
        configuration(arguments, environment)


def test_toml_values_have_types():
    with pytest.raises(ConfigError, match=r"drain_ms=1.5: must be a whole number"):
        load({"drain_ms": 1.5}, {}, {})
    with pytest.raises(ConfigError, match="drain_ms=True: must be a whole number"):
        load({"drain_ms": True}, {}, {})


def test_toml_that_is_no_text(tmp_path):
    (tmp_path / "bad").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_toml(str(tmp_path / "bad"))


def test_uvloop_is_used_where_it_is(monkeypatch):
    assert event_loop_factory().__module__.startswith("uvloop")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert event_loop_factory() is asyncio.new_event_loop


@pytest.mark.parametrize("name", [5, "", "a" * 257, os.fsdecode(b"a\xff")])
def test_a_tenant_is_text(name: object) -> None:
    with pytest.raises(ConfigError, match="tenants=1000="):
        load({"tenants": {"1000": name}}, {}, {})


def test_a_tenant_may_have_any_text_for_a_name() -> None:
    for name in ("a" * 256, "ä b/../c*", "\0", "{x}"):
        assert load({"tenants": {"1000": name}}, {}, {}).tenants == {"1000": name}


def test_quotas_are_sizes_by_tenant() -> None:
    for toml, flags in (
        ({"dram_quotas": {"alice": "8G", "*": 1 << 20}}, {}),
        ({"dram_quotas": "alice=8G,*=1M"}, {}),
        ({}, {"dram_quotas": parse_setting("dram_quotas", "alice=8GiB,*=1m")}),
    ):
        assert load(toml, {}, flags).dram_quotas == {"alice": 8 << 30, "*": 1 << 20}
        assert load(toml, {}, flags).limits.dram_quotas == {"alice": 8 << 30, "*": 1 << 20}
    assert load({"ssd_quotas": {"a,b=c": 5}}, {}, {}).ssd_quotas == {"a,b=c": 5}
    for wrong in ({"alice": -1}, {"alice": True}, {"": 5}, {"alice": 1.5}, {"alice": "lots"}, 5):
        with pytest.raises(ConfigError, match="remote_quotas"):
            load({"remote_quotas": wrong}, {}, {})


def test_the_variable_that_names_the_file_is_no_setting() -> None:
    assert load({}, {CONFIG_VARIABLE: "kvstored.toml"}, {}) == StoreConfig()


def test_a_client_without_the_daemon_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['kvstore.server.daemon'] = None; from kvstore.__main__ import main; main([])"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "is not installed: this is the client alone (pip install 'attnstore[daemon]')" in ended.stderr


@pytest.mark.parametrize("name", ["hint_pin_share_max", "hint_retain_share_max"])
def test_shares_of_hints_are_shares(name: str) -> None:
    assert getattr(StoreConfig(**{name: 0.0}), name) == 0.0
    for value in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="between 0 and 1") as refused:
            StoreConfig(**{name: value})
        assert refused.value.field == name
