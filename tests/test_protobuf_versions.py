"""The client installs without extras and speaks the contract under each protobuf that engines pin."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"

# Runs inside the scratch venv, with warnings as errors.
PROGRAM = '''
import importlib, importlib.metadata, importlib.util, pkgutil, sys
import google.protobuf, kvstore, kvstore.client, kvstore.v1
from google.protobuf.descriptor import FieldDescriptor as F

VALUES = {F.CPPTYPE_STRING: "x", F.CPPTYPE_BOOL: True, F.CPPTYPE_DOUBLE: 0.5, F.CPPTYPE_FLOAT: 0.5}

def value(field, depth):
    if field.cpp_type == F.CPPTYPE_MESSAGE:
        return filled(field.message_type._concrete_class, depth - 1)
    if field.cpp_type == F.CPPTYPE_ENUM:
        return field.enum_type.values[-1].number
    return b"y" if field.type == F.TYPE_BYTES else VALUES.get(field.cpp_type, 7)

def filled(message_class, depth):
    """A message with every field set, down to a depth: some messages hold their own kind."""
    message = message_class()
    for field in message_class.DESCRIPTOR.fields:
        if field.cpp_type == F.CPPTYPE_MESSAGE and depth == 0:
            continue
        target = getattr(message, field.name)
        if field.cpp_type == F.CPPTYPE_MESSAGE and field.message_type.GetOptions().map_entry:
            key, item = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            if item.cpp_type == F.CPPTYPE_MESSAGE:
                target[value(key, depth)].CopyFrom(value(item, depth))
            else:
                target[value(key, depth)] = value(item, depth)
        elif hasattr(target, "extend"):
            target.extend([value(field, depth), value(field, depth)])
        elif field.cpp_type == F.CPPTYPE_MESSAGE:
            target.CopyFrom(value(field, depth))
        else:
            setattr(message, field.name, value(field, depth))
    return message

tripped = 0
for module in pkgutil.iter_modules(kvstore.v1.__path__):
    stub = importlib.import_module("kvstore.v1." + module.name)
    if module.name.endswith("_pb2"):
        for name in stub.DESCRIPTOR.message_types_by_name:
            message = filled(getattr(stub, name), depth=3)
            wire = message.SerializeToString()
            assert type(message).FromString(wire) == message, name
            assert wire or not message.DESCRIPTOR.fields, name
            tripped += 1
assert "site-packages" in kvstore.__file__, kvstore.__file__
for absent in ("torch", "grpc_health", "grpc_reflection", "prometheus_client", "uvloop"):
    assert importlib.util.find_spec(absent) is None, absent
print(google.protobuf.__version__, tripped)
'''


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("wheel")
    subprocess.run(["make", "wheel", f"INTO={into}"], cwd=ROOT, check=True)
    (path,) = into.glob("attnstore-*.whl")
    return path


def scratch_venv(requirement: str, wheel: Path) -> Path:
    """A venv with the wheel and its base dependencies; kept for the next run until pyproject.toml changes."""
    venv = CACHE / ("venv-" + requirement.replace("==", "-").rstrip(".*"))
    python, made_for = venv / "bin/python", venv / "made-for.toml"
    pyproject = (ROOT / "pyproject.toml").read_text()
    if not made_for.exists() or made_for.read_text() != pyproject:
        shutil.rmtree(venv, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
        install(python, str(wheel), requirement)
        made_for.write_text(pyproject)
    install(python, "--no-deps", "--force-reinstall", str(wheel))
    return python


def install(python: Path, *arguments: str) -> None:
    pip = [sys.executable, "-P", "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *arguments], check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("requirement", ["protobuf==6.33.*", "protobuf==7.*"])
def test_client_under_protobuf(requirement: str, wheel: Path, tmp_path: Path) -> None:
    python = scratch_venv(requirement, wheel)
    command = [python, "-P", "-W", "error", "-c", PROGRAM]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    version, tripped = ran.stdout.split()
    assert version.startswith(requirement.partition("==")[2].rstrip("*"))
    assert int(tripped) > 0
