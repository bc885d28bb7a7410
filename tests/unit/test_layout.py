"""Namespaces and the geometry of a chunk: identity, validation, shard numbers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from kvstore import layout
from kvstore.errors import BadRequest, StoreError, Unsupported
from kvstore.layout import GroupKind, GroupSpec, LayerSlice, NamespaceSpec

LAYERS = (LayerSlice(0, 0, 512), LayerSlice(1, 512, 512))
SPEC = NamespaceSpec(
    model="llama",
    weights_digest=b"w" * 32,
    layout_fingerprint="hf/k,v:[H,T,D]:float32",
    chunk_tokens=64,
    groups=(
        GroupSpec("full", 1024, shard_count=2, layers=LAYERS),
        GroupSpec("latent", 576, kind=GroupKind.LATENT, position_rule="none"),
    ),
    tensor_parallel=2,
)

# One different value for every field.
OTHER: dict[str, Any] = {
    "model": "llama 2",
    "weights_digest": b"v" * 32,
    "layout_fingerprint": "hf/k,v:[T,H,D]:float32",
    "chunk_tokens": 128,
    "groups": SPEC.groups[:1],
    "weights_epoch": 1,
    "adapter_digest": b"lora",
    "kv_scales_digest": b"scales",
    "hash_protocol": "vllm.v1",
    "tensor_parallel": 4,
    "pipeline_parallel": 2,
    "context_parallel": 2,
    "salt": b"cache salt",
}


def test_every_field_but_the_epoch_is_part_of_the_digest() -> None:
    """A field that were left out would let KV of different layouts or models be mistaken for each other."""
    assert OTHER.keys() == {item.name for item in fields(NamespaceSpec)}
    digests = {name: replace(SPEC, **{name: value}).digest("alice") for name, value in OTHER.items()}
    assert digests.pop("weights_epoch") == SPEC.digest("alice")
    found = {SPEC.digest("alice"), SPEC.digest("bob"), *digests.values()}
    assert len(found) == len(OTHER) + 1
    assert all(len(digest) == 32 for digest in found)


@pytest.mark.parametrize(
    "group",
    [
        GroupSpec("other", 1024, shard_count=2, layers=LAYERS),
        GroupSpec("full", 1025, shard_count=2, layers=LAYERS),
        GroupSpec("full", 1024, shard_count=3, layers=LAYERS),
        GroupSpec("full", 1024, shard_count=2, layers=LAYERS, kind=GroupKind.LATENT),
        GroupSpec("full", 1024, shard_count=2, layers=LAYERS[:1]),
        GroupSpec("full", 1024, shard_count=2, layers=()),
        GroupSpec("full", 1024, shard_count=2, layers=(LayerSlice(2, 0, 512), LAYERS[1])),
        GroupSpec("full", 1024, shard_count=2, layers=(LayerSlice(0, 0, 511), LAYERS[1])),
        GroupSpec("full", 1024, shard_count=2, layers=(LayerSlice(0, 1, 511), LAYERS[1])),
        GroupSpec("full", 1024, shard_count=2, layers=LAYERS, position_rule="yarn"),
    ],
)
def test_every_field_of_a_group_is_part_of_the_digest(group: GroupSpec) -> None:
    groups = (SPEC.groups[0], group if group.name != "full" else replace(group, name="latent"))
    different = replace(SPEC, groups=(group, SPEC.groups[1]))
    assert different.digest("alice") != SPEC.digest("alice")
    assert replace(SPEC, groups=groups).digest("alice") != SPEC.digest("alice")
    assert replace(SPEC, groups=SPEC.groups[::-1]).digest("alice") != SPEC.digest("alice")


def test_the_digest_does_not_run_fields_together() -> None:
    one = replace(SPEC, model="ab", layout_fingerprint="c")
    two = replace(SPEC, model="a", layout_fingerprint="bc")
    assert one.digest("alice") != two.digest("alice")
    assert replace(SPEC, model="ellama").digest("alic") != replace(SPEC, model="llama").digest("alice")
    assert replace(SPEC, adapter_digest=b"x").digest("a") != replace(SPEC, kv_scales_digest=b"x").digest("a")


def test_the_digest_never_changes() -> None:
    """Salts, hence keys, are derived from it: a change makes everything that is stored a miss."""
    assert SPEC.digest("alice").hex() == "887291e508df13e3df2ad6805620a36bff2ab47d0084f8e8170d77a6f75d8468"


def test_differences_name_the_field_and_both_values() -> None:
    assert SPEC.differences(SPEC) == []
    for name, value in OTHER.items():
        (difference,) = SPEC.differences(replace(SPEC, **{name: value}))
        assert difference.startswith(f"{name}: ")
    assert SPEC.differences(replace(SPEC, tensor_parallel=4, salt=b"s")) == [
        "tensor_parallel: 2 != 4",
        'salt: "" != 73',
    ]
    assert max(map(len, SPEC.differences(replace(SPEC, model="m" * 1_000)))) < 300


def test_shards_are_numbered_through_the_groups() -> None:
    assert (SPEC.shard_count, SPEC.shard_bytes, SPEC.chunk_bytes) == (3, (1024, 1024, 576), 2624)
    assert [SPEC.shard_number("full", 0), SPEC.shard_number("full", 1), SPEC.shard_number("latent")] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("call", "field", "message"),
    [
        (lambda: SPEC.shard_number("full", 2), "rank", "has 2 shards"),
        (lambda: SPEC.shard_number("full", -1), "rank", "has 2 shards"),
        (lambda: SPEC.shard_number("latent", 1), "rank", "has 1 shards"),
        (lambda: SPEC.shard_number("window"), "group", "no such group"),
    ],
)
def test_shards_that_are_not_there_are_refused(call: Any, field: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as error:
        call()
    assert error.value.field == field


def group(**changes: Any) -> dict[str, Any]:
    return {"groups": (replace(SPEC.groups[0], **changes),)}


def slices(*spans: tuple[int, int]) -> dict[str, Any]:
    return group(layers=tuple(LayerSlice(i, offset, length) for i, (offset, length) in enumerate(spans)))


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"model": ""}, "namespace.model", ""),
    ({"model": "m" * 1025}, "namespace.model", "m" * 80 + "… (1025 characters)"),
    ({"model": "é" * 513}, "namespace.model", ""),
    ({"layout_fingerprint": ""}, "namespace.layout_fingerprint", ""),
    ({"hash_protocol": ""}, "namespace.hash_protocol", ""),
    ({"weights_digest": b""}, "namespace.weights_digest", ""),
    ({"weights_digest": bytes(65)}, "namespace.weights_digest", "0" * 80 + "… (130 characters)"),
    ({"adapter_digest": bytes(65)}, "namespace.adapter_digest", ""),
    ({"kv_scales_digest": bytes(65)}, "namespace.kv_scales_digest", ""),
    ({"salt": bytes(65)}, "namespace.salt", ""),
    ({"weights_epoch": -1}, "namespace.weights_epoch", "-1"),
    ({"weights_epoch": 1 << 63}, "namespace.weights_epoch", str(1 << 63)),
    ({"chunk_tokens": 0}, "namespace.chunk_tokens", "0"),
    ({"chunk_tokens": 65_537}, "namespace.chunk_tokens", "65537"),
    ({"tensor_parallel": 0}, "namespace.tensor_parallel", "0"),
    ({"pipeline_parallel": 65_537}, "namespace.pipeline_parallel", "65537"),
    ({"context_parallel": -3}, "namespace.context_parallel", "-3"),
    ({"groups": ()}, "namespace.groups", "()"),
    ({"groups": SPEC.groups[:1] * 2}, "namespace.groups", "['full', 'full']"),
    (group(name=""), "namespace.groups[0].name", ""),
    (group(name="n" * 65), "namespace.groups[0].name", "n" * 65),
    (group(position_rule="p" * 65), "namespace.groups[0].position_rule", "p" * 65),
    (group(shard_bytes=0), "namespace.groups[0].shard_bytes", "0"),
    (group(shard_bytes=(1 << 30) + 1, layers=()), "namespace.groups[0].shard_bytes", str((1 << 30) + 1)),
    (group(shard_count=0), "namespace.groups[0].shard_count", "0"),
    (group(shard_count=257), "namespace.groups[0].shard_count", "257"),
    ({"groups": (GroupSpec("a", 1, 200), GroupSpec("b", 1, 57))}, "namespace.groups: shards in all", "257"),
    (slices((0, 512), (511, 512)), "namespace.groups[0].layers[1]", "[511, 1023)"),
    (slices((512, 512), (0, 512)), "namespace.groups[0].layers[1]", "[0, 512)"),
    (slices((0, 512), (512, 513)), "namespace.groups[0].layers[1]", "[512, 1025)"),
    (slices((0, 0)), "namespace.groups[0].layers[0]", "[0, 0)"),
    (slices((-1, 4)), "namespace.groups[0].layers[0]", "[-1, 3)"),
    (group(layers=(LayerSlice(0, 0, 1),) * 16_385), "namespace.groups: layer slices in all", "16385"),
]


@pytest.mark.parametrize(
    ("changes", "field", "value"), REFUSED, ids=[f"{f} {n}" for n, (_, f, _) in enumerate(REFUSED)]
)
def test_a_spec_that_cannot_work_is_refused_by_field(changes: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(BadRequest) as error:
        replace(SPEC, **changes).validate()
    assert error.value.field == field
    if value:
        assert error.value.value == value


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": "m" * 1024},
        {"salt": bytes(64), "weights_digest": b"x"},
        {"weights_epoch": (1 << 63) - 1},
        {"chunk_tokens": 1},
        {"chunk_tokens": 65_536},
        group(layers=()),
        group(shard_bytes=1, layers=()),
        group(shard_bytes=1 << 30),
        group(shard_count=256),
        slices((0, 1), (1023, 1)),
    ],
)
def test_a_spec_at_its_bounds_works(changes: dict[str, Any]) -> None:
    replace(SPEC, **changes).validate()


@pytest.mark.parametrize("kind", [kind for kind in GroupKind if kind not in layout.SUPPORTED_KINDS])
def test_kinds_that_are_not_built_are_refused_clearly(kind: GroupKind) -> None:
    with pytest.raises(Unsupported, match=r"not supported yet.*supported: full, latent") as error:
        replace(SPEC, **group(kind=kind)).validate()
    assert isinstance(error.value, StoreError) and error.value.value == kind.value
