"""Facts about the repository that no compiler checks: who may import whom, what is shipped, fresh stubs."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# What a package is called, and the folder it lives in. The mapped ones come first: they are more exact.
FOLDERS = {
    "kvstore.gpu_worker": ROOT / "gpu_worker",
    "kvstore.scheduler": ROOT / "scheduler",
    "kvstore.kernels": ROOT / "kernels",
    "kvstore": ROOT / "kvstore",
}
SIDES = ("kvstore.gpu_worker", "kvstore.scheduler", "kvstore.kernels")
HEAVY = ("torch", "triton", "transformers", "vllm", "sglang", "lmcache")
ENGINES = ("vllm", "sglang", "lmcache")
"""Not installed where our own code runs: only their connectors import them, and nothing imports those."""
BOTTOM = ("types", "errors", "keys", "layout", "answers", "arguments")
"""Modules of kvstore that everybody may import: nouns, failures, chunk keys, geometry, answers."""
INNER_ROOMS = tuple(
    f"kvstore.{room}" for room in ("core", "server", "transport", "tiers", "fleet", "sim", "replay", "cli")
)
"""Rooms of the daemon: an engine's process, which has the client, needs nothing of them."""
OUTSIDE_WORLD = (
    *("asyncio", "concurrent", "multiprocessing", "queue", "sched", "signal", "subprocess", "threading"),
    *("datetime", "time", "random", "secrets", "uuid"),
    *("fcntl", "io", "mmap", "os", "pathlib", "select", "selectors", "shutil", "sys", "tempfile"),
    *("ftplib", "http", "socket", "ssl", "urllib"),
    *("grpc", "lmdb", "logging", "prometheus_client", "uvloop"),
)


def pyproject() -> dict[str, dict]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules(package: str) -> Iterator[tuple[str, Path]]:
    """Every module of a package that is kept by hand, with its file."""
    folder = FOLDERS[package]
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join((package, *parts)).removesuffix(".__init__")
        if not within(name, "kvstore.v1"):
            yield name, path


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def imports(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a module imports, wherever in the file it does so."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(target)), *_],
            ):
                yield node.lineno, target


def allowed(package: str, name: str) -> bool:
    """The one table of who may import whom; `package` is whose module asks."""
    if within(name, "gpu_worker", "scheduler", "kernels", "proto", "tests", "benchmarks", "examples"):
        return False  # folders of this repository, not packages
    own = name == "kvstore" or name == "kvstore.__version__" or within(name, package)
    ours = within(name, "kvstore")
    match package:
        case "kvstore.core":
            bottom = within(name, *(f"kvstore.{module}" for module in BOTTOM))
            return (own or bottom) if ours else not within(name, *OUTSIDE_WORLD, *HEAVY)
        case "kvstore.promptcache":
            bottom = within(name, *(f"kvstore.{module}" for module in BOTTOM))
            return (own or bottom) if ours else not within(name, *HEAVY)
        case "kvstore.client" | "kvstore.wire":
            return not within(name, *SIDES, *HEAVY, *INNER_ROOMS)
        case "kvstore.tiers":
            core = within(name, "kvstore.core.events", "kvstore.core.ssd", "kvstore.core.namespaces")
            rooms = ("client", "cli", "sim", "replay", "transport", "server", "core")
            closed = within(name, *(f"kvstore.{room}" for room in rooms))
            return core or within(name, "kvstore.server.logs") or not (closed or within(name, *SIDES, *HEAVY))
        case "kvstore.transport":
            events = within(name, "kvstore.core.events", "kvstore.server.loop", "kvstore.server.logs")
            closed = within(
                name,
                *(
                    f"kvstore.{room}"
                    for room in ("client", "cli", "sim", "replay", "server", "core", "fleet")
                ),
            )
            return events or not (closed or within(name, *SIDES, *HEAVY))
        case "kvstore.server" | "kvstore.fleet":
            return not within(
                name, *SIDES, *HEAVY, "kvstore.client", "kvstore.cli", "kvstore.sim", "kvstore.replay"
            )
        case "kvstore.replay":
            bottom = within(name, *(f"kvstore.{module}" for module in BOTTOM))
            return own or bottom or within(name, "kvstore.core") or not (ours or within(name, *HEAVY))
        case "kvstore":
            return not within(name, *SIDES, *HEAVY)
        case "kvstore.scheduler":
            names = ("client", "types", "layout", "errors", "config", "option_types", "startup")
            return own or not ours or within(name, *(f"kvstore.{module}" for module in names))
        case "kvstore.gpu_worker" | "kvstore.gpu_worker.connectors":
            connectors = "kvstore.gpu_worker.connectors"
            if package != connectors and within(name, connectors, *ENGINES):
                return False
            names = ["client", "types", "layout", "keys", "errors", "option_types", "startup", "kernels"]
            names.append("promptcache")
            if package == connectors:
                # What digests what computes, what decides whether to load, and devices: none knows an engine.
                names += ["gpu_worker.identity", "gpu_worker.compute_or_load"]
                names += [f"gpu_worker.{name}" for name in ("device", "segments", "bounce", "proven")]
            return own or not ours or within(name, *(f"kvstore.{module}" for module in names))
        case "kvstore.kernels":
            standard = name.partition(".")[0] in sys.stdlib_module_names
            return own or standard or within(name, "torch", "triton", "numpy")
    raise AssertionError(package)


@pytest.mark.parametrize("package", FOLDERS)
def test_imports_flow_one_way(package: str) -> None:
    wrong = []
    for name, path in modules(package):
        rooms = (
            *(
                f"kvstore.{room}"
                for room in [
                    "core",
                    "promptcache",
                    "replay",
                    "client",
                    "wire",
                    "tiers",
                    "transport",
                    "fleet",
                    "server",
                ]
            ),
            "kvstore.gpu_worker.connectors",
        )
        parts = (part for part in rooms if within(name, part))
        asking = next(parts, package)
        for line, imported in imports(name, path):
            if not allowed(asking, imported):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("package", "name", "answer"),
    [
        ("kvstore", "torch.cuda", False),
        ("kvstore", "torchvision_free_name", True),
        ("kvstore", "kvstore.gpu_worker", False),
        ("kvstore", "kernels.rotate", False),
        ("kvstore.core", "kvstore.core.pool", True),
        ("kvstore.core", "kvstore.types.ChunkKey", True),
        ("kvstore.core", "kvstore.client", False),
        ("kvstore.core", "kvstore.answers.Matched", True),
        ("kvstore.client", "kvstore.core.events", False),
        ("kvstore.client", "kvstore.answers.Matched", True),
        ("kvstore.wire", "kvstore.tiers.format", False),
        ("kvstore.tiers", "kvstore.core.events.WriteIndex", True),
        ("kvstore.tiers", "kvstore.core.store", False),
        ("kvstore.tiers", "kvstore.transport.lane", False),
        ("kvstore.transport", "kvstore.server.loop.Loop", True),
        ("kvstore.transport", "kvstore.core.state", False),
        ("kvstore.transport", "kvstore.server.daemon", False),
        ("kvstore.server", "kvstore.core.store.Store", True),
        ("kvstore.fleet", "kvstore.client", False),
        ("kvstore.transport", "kvstore.fleet.registry", False),
        ("kvstore.server", "kvstore.sim.integrity", False),
        ("kvstore.replay", "kvstore.core.store.Store", True),
        ("kvstore.replay", "kvstore.server.loop", False),
        ("kvstore.replay", "kvstore.sim.disk", False),
        ("kvstore.replay", "matplotlib.pyplot", True),
        ("kvstore.core", "kvstore.replay", False),
        ("kvstore.server", "kvstore.replay", False),
        ("kvstore.core", "os.path", False),
        ("kvstore.core", "kvstore.promptcache.schema", False),
        ("kvstore.promptcache", "kvstore.keys.derived_key", True),
        ("kvstore.promptcache", "kvstore.client", False),
        ("kvstore.promptcache", "transformers", False),
        ("kvstore.tiers", "kvstore.promptcache.schema.parse_schema", True),
        ("kvstore.gpu_worker", "kvstore.promptcache.layout.Layout", True),
        ("kvstore.core", "time.monotonic", False),
        ("kvstore.scheduler", "kvstore.client.Client", True),
        ("kvstore.scheduler", "kvstore.core.store", False),
        ("kvstore.gpu_worker", "kvstore.kernels.rotate", True),
        ("kvstore.gpu_worker", "kvstore.scheduler", False),
        ("kvstore.gpu_worker", "vllm.config", False),
        ("kvstore.gpu_worker", "kvstore.gpu_worker.connectors.vllm", False),
        ("kvstore.gpu_worker.connectors", "vllm.config", True),
        ("kvstore.gpu_worker.connectors", "kvstore.client.Client", True),
        ("kvstore.gpu_worker.connectors", "kvstore.gpu_worker.identity.absorb", True),
        ("kvstore.gpu_worker.connectors", "kvstore.gpu_worker.compute_or_load.ComputeOrLoad", True),
        ("kvstore.gpu_worker.connectors", "kvstore.gpu_worker.device.Device", True),
        ("kvstore.gpu_worker.connectors", "kvstore.gpu_worker.loader.Loader", False),
        ("kvstore.gpu_worker.connectors", "kvstore.gpu_worker.engine", False),
        ("kvstore.gpu_worker.connectors", "kvstore.core.store", False),
        ("kvstore.kernels", "torch.nn", True),
        ("kvstore.kernels", "kvstore.types", False),
        ("kvstore.kernels", "grpc", False),
    ],
)
def test_the_import_table_says_no(package: str, name: str, answer: bool) -> None:
    assert allowed(package, name) is answer


def test_every_way_to_import_is_seen(tmp_path: Path) -> None:
    source = tmp_path / "pool.py"
    source.write_text(
        "import os.path as p\nfrom . import lease\nfrom ..types import Tier\nfrom kvstore import client\n"
        "def f():\n    import torch\n    importlib.import_module('grpc')\n    __import__('time')\n"
    )
    seen = {imported for _, imported in imports("kvstore.core.pool", source)}
    ours = {"kvstore.core.lease", "kvstore.types.Tier", "kvstore.client"}
    assert seen == {"os.path", "torch", "grpc", "time", *ours}


def test_core_does_no_io() -> None:
    """Also not with what needs no import."""
    wrong = []
    for name, path in modules("kvstore"):
        if within(name, "kvstore.core"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} is asynchronous")
                    case ast.Call(func=ast.Name(id="open" | "print" | "input" | "hash" as call)):
                        wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {call}()")
    assert not wrong, "\n".join(wrong)


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for folder in FOLDERS.values() for path in folder.rglob("*.py")}
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in a wheel that was built just now."""
    into = tmp_path_factory.mktemp("wheel")
    subprocess.run(["make", "wheel", f"INTO={into}"], cwd=ROOT, check=True)
    (wheel,) = into.glob("attnstore-*.whl")
    return [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]


def test_wheel_ships_one_package(shipped: list[str]) -> None:
    assert {name.partition("/")[0] for name in shipped} == {"kvstore"}


def test_wheel_ships_every_module_and_its_types(shipped: list[str]) -> None:
    expected = {
        "/".join((*package.split("."), *path.relative_to(folder).parts))
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    assert set(shipped) == expected | {"kvstore/py.typed"}


def test_console_scripts_exist() -> None:
    for script, target in pyproject()["project"]["scripts"].items():
        module, _, function = target.partition(":")
        path = FOLDERS["kvstore"].joinpath(*module.split(".")[1:]).with_suffix(".py")
        assert path.exists(), f"{script}: {path} is missing"
        defined = {
            node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert function in defined, f"{script}: {path} has no {function}()"


def test_version_is_one() -> None:
    import kvstore

    assert kvstore.__version__ == pyproject()["project"]["version"]


def test_client_needs_only_the_base_install() -> None:
    """What an engine's process pays for the client; grpc itself imports grpc_health and such if present."""
    heavy = (*HEAVY, "gguf", "lmdb", "prometheus_client", "psutil", "uvloop")
    script = f"import sys, kvstore.client; print([name for name in {heavy!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.strip() == "[]"


def test_stubs_are_fresh(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed: stubs cannot be written anew")
    protos = sorted((ROOT / "proto/kvstore/v1").glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-P", "-m", "grpc_tools.protoc", "-I", "proto", *outputs]
    subprocess.run([*command, *(str(proto.relative_to(ROOT)) for proto in protos)], cwd=ROOT, check=True)
    kept = {path.name: path.read_text() for path in (ROOT / "kvstore/v1").glob("*_pb2*.py*")}
    fresh = {path.name: path.read_text() for path in (tmp_path / "kvstore/v1").iterdir()}
    stale = sorted(name for name in kept | fresh if kept.get(name) != fresh.get(name))
    assert not stale, f"run `make proto`: {stale}"


def make_targets() -> list[re.Pattern[str]]:
    names = re.findall(r"(?m)^([a-z][\w%-]*):(?!=)", (ROOT / "Makefile").read_text())
    return [re.compile(re.escape(name).replace("%", r"[\w-]+")) for name in names]


def named_targets(text: str) -> set[str]:
    """Targets of each `make ...` in the code of a Markdown page; prose may make whatever it likes."""
    fenced, inline = r"(?s)```.*?```", r"`[^`\n]+`"
    code = "\n".join(re.findall(fenced, text) + re.findall(inline, re.sub(fenced, "", text)))
    commands = re.findall(r"(?m)(?:^|[`$&;])[ \t]*make[ \t]+([^#`&;\n]+)", code)
    return {word for command in commands for word in command.split() if re.fullmatch(r"[a-z][\w-]*", word)}


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_named_make_targets_exist(page: Path) -> None:
    targets = make_targets()
    named = named_targets(page.read_text())
    assert [name for name in sorted(named) if not any(target.fullmatch(name) for target in targets)] == []


def test_make_commands_in_code_are_seen() -> None:
    prose = "make it so\n`make check` and `make test ARGS=-x`\n"
    page = prose + "```\n$ make demo  # shows\nmake venv && make bench-copy\n```\n"
    assert named_targets(page) == {"check", "test", "demo", "venv", "bench-copy"}
    assert any(target.fullmatch("bench-copy") for target in make_targets())
    assert not any(target.fullmatch("nonsense") for target in make_targets())


def named_tests(text: str) -> list[tuple[str, str]]:
    """(file below tests/, test or "") of everything in a Markdown page's code that names a test or a file of tests."""
    found = re.findall(r"`((?:[\w.-]+/)*test_\w+\.py)(?:::(test_\w+))?`", text)
    return [(file, test) for file, test in found]


def test_every_promise_names_tests_that_exist() -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    missing = []
    for file, test in named_tests(text):
        path = ROOT / "tests" / file
        source = path.read_text() if path.exists() else ""
        if not source or (test and not re.search(rf"(?m)^(?:async )?def {test}\(", source)):
            missing.append(f"{file}::{test}")
    assert not missing, missing
    third = text.split("## 3.")[1].split("## 4.")[0]
    rows = [
        line for line in third.splitlines() if line.startswith("| ") and not line.startswith("| what goes")
    ]
    assert len(rows) > 30
    assert [row for row in rows if not named_tests(row.rsplit(" | ", 1)[1])] == [], "a row without a test"


def test_names_of_tests_in_pages_are_seen() -> None:
    page = (
        "`e2e/test_a.py::test_b`, `unit/core/test_c.py`, `test_tidy.py`, e2e/test_d.py::test_e, `make test`"
    )
    assert named_tests(page) == [
        ("e2e/test_a.py", "test_b"),
        ("unit/core/test_c.py", ""),
        ("test_tidy.py", ""),
    ]


LATER = {
    (
        "kvstore.__main__",
        "kvstore.core.store",
    ): "loaded only when a daemon starts: `--help` and errors come at once",
    ("kvstore.__main__", "kvstore.tiers.disk_port"): "loaded only when a daemon starts",
    (
        "kvstore.cli.check",
        "kvstore.tiers.check",
    ): "needs what only the daemon's install has; `kvctl` works without",
    (
        "kvstore.cli.simulate",
        "kvstore.replay.hardware",
    ): "loaded only when it runs: every kvctl pays for imports",
    ("kvstore.cli.simulate", "kvstore.replay.trace"): "so too",
    ("kvstore.cli.advise", "kvstore.replay.shadow"): "so too",
    ("kvstore.client.namespace", "kvstore.client.sync"): "the public way back to the client that opened it",
    (
        "kvstore.core.bulk.needed",
        "kvstore.core.policies.hints",
    ): "what is done in bulk is part of what it belongs to",
    ("kvstore.core.bulk.cohorts", "kvstore.core.policies.expected"): "so too",
    ("kvstore.core.bulk.needed", "kvstore.core.state"): "so too",
    ("kvstore.core.bulk.batch", "kvstore.core.workers"): "so too",
    ("kvstore.core.bulk.batch", "kvstore.core.state"): "so too",
    (
        "kvstore.core.namespaces",
        "kvstore.core.policies",
    ): "a policy needs to know namespaces, which hold its candidates",
    (
        "kvstore.core.cold_tier",
        "kvstore.core.manifests",
    ): "the seam imports none of those that stand on its two sides",
    ("kvstore.core.cold_tier", "kvstore.core.ssd.quarantine"): "so too",
    ("kvstore.core.cold_tier", "kvstore.core.state"): "so too",
    ("kvstore.core.bulk.ghosts", "kvstore.core.state"): "so too",
}
"""Why the first module imports the second for type checkers alone. Anything else is a circle to be dissolved:
hand over what a class needs, or say at the bottom what it must be able to do (a Protocol, see `client/line.py`)."""


def imported_for_types(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for line in node.body:
                assert isinstance(line, ast.ImportFrom) and line.module and not line.level, ast.unparse(line)
                yield line.module


def test_no_circles_are_hidden_behind_type_checking() -> None:
    found = {
        (name, target)
        for name, path in modules("kvstore")
        for target in imported_for_types(path)
        if within(target, "kvstore")
    }
    assert found == set(LATER)


def test_each_planted_bug_is_listed_beside_the_name_of_its_source() -> None:
    lists = ROOT / "tests" / "mutants"
    for path in lists.rglob("*.toml"):
        named = path.relative_to(lists).as_posix()
        assert named.startswith("bugs/"), (
            f"tests/mutants/{named}: move each bug to tests/mutants/bugs/PATH_OF_ITS_SOURCE.toml, without its "
            "`file` line, for example to tests/mutants/bugs/kvstore/core/state.py.toml"
        )
        source = named.removeprefix("bugs/").removesuffix(".toml")
        assert (ROOT / source).is_file(), f"tests/mutants/{named}: there is no {source}"
