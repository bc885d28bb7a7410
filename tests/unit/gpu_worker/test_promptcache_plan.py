"""From the positions of a prompt to parts and holes, written out: a token is a byte, a chunk has 8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.gpu_worker.assembly import Assembly, Part, missing_spans
from kvstore.gpu_worker.promptcache.plan import OWNER_PREFIX, Recipe, assemble, jobs, owner_name
from kvstore.keys import ROOT, exact_chain
from kvstore.promptcache import ByteTokenizer, Encoding, Layout, Method, parse_prompt, parse_schema
from kvstore.types import ChunkKey

SALT = bytes(32)
#         0    5       10..19    20        29
SCHEMA = (
    '<schema name="s">Begin<module name="a">first<param name="p" length="5"/>behind it</module>'
    '<union><module name="b">long one</module><module name="c">short</module></union>end</schema>'
)


def encoding_of(schema: str = SCHEMA, method: Method = Method.BEGINNING) -> Encoding:
    return Encoding(Layout(parse_schema(schema), ByteTokenizer()), SALT, chunk_tokens=8, method=method)


def assembly_of(
    prompt: str,
    schema: str = SCHEMA,
    recipe: Recipe | None = None,
    *,
    moves: bool = True,
    close_gaps: bool = False,
) -> Assembly | None:
    recipe = recipe or Recipe()
    encoding = encoding_of(schema, recipe.method)
    placement = encoding.layout.place(parse_prompt(prompt, encoding.layout.schema), close_gaps=close_gaps)
    return assemble(encoding, placement, salt=SALT, moves=moves, recipe=recipe)


def text(assembly: Assembly) -> str:
    return bytes(assembly.tokens).decode()


def places(parts: Sequence[Part]) -> list[tuple[int, int, int]]:
    return [(part.first, part.count, part.delta) for part in parts]


def test_an_argument_is_a_hole_at_the_first_positions_of_its_parameter() -> None:
    found = assembly_of('<prompt schema="s"><a p="xyz"/><c/>?</prompt>')
    assert found is not None
    assert text(found) == "Beginfirstxyzbehind itshortend?"
    assert list(found.positions) == [*range(10), 10, 11, 12, *range(15, 24), *range(24, 29), *range(32, 36)]
    # Begin | first | xyz | behind i, t | short | end | ?
    assert places(found.parts) == [(0, 5, 0), (5, 5, 0), (13, 8, 0), (21, 1, 0), (22, 5, 0), (27, 3, 0)]
    assert found.holes(len(found.tokens), found.parts) == [(10, 13), (30, 31)]
    assert (found.exact, found.end) == (5, 36)


def test_generated_tokens_are_a_hole_that_goes_on() -> None:
    found = assembly_of('<prompt schema="s"><c/>?</prompt>')
    assert found is not None and text(found) == "Beginshortend?"
    assert found.holes(len(found.tokens) + 4, found.parts) == [(13, 18)]


def test_a_prompt_that_ends_with_a_module_computes_its_last_token_again() -> None:
    found = assembly_of('<prompt schema="s"><b/></prompt>')
    assert found is not None and text(found) == "Beginlong oneend"
    assert found.holes(16, found.parts) == [(15, 16)]


def test_what_is_not_there_is_a_hole() -> None:
    found = assembly_of('<prompt schema="s"><a p="xyz"/><c/>?</prompt>')
    assert found is not None
    assert found.holes(31, found.parts[:2]) == [(10, 31)]
    assert found.holes(31, found.parts[2:], first=5) == [(5, 13), (30, 31)]
    assert found.holes(31, ()) == [(0, 31)]


def test_text_before_a_module_moves_what_follows() -> None:
    found = assembly_of('<prompt schema="s">My text<b/>?</prompt>')
    assert found is not None and text(found) == "BeginMy textlong oneend?"
    assert list(found.positions) == [*range(5), *range(5, 12), *range(24, 32), *range(32, 35), 35]
    # With one module before it there are 19 positions of room: nothing has moved
    assert places(found.parts) == [(0, 5, 0), (12, 8, 0), (20, 3, 0)]
    close = assembly_of('<prompt schema="s">My text<b/>?</prompt>', close_gaps=True)
    assert close is not None and list(close.positions) == list(range(24))
    assert places(close.parts) == [(0, 5, 0), (12, 8, -12), (20, 3, -12)]
    still = assembly_of('<prompt schema="s">My text<b/>?</prompt>', close_gaps=True, moves=False)
    assert still is not None and places(still.parts) == [(0, 5, 0)]


def test_a_prompt_without_modules_is_like_any_other() -> None:
    plain = '<schema name="s">Begin<module name="a">first</module></schema>'
    assert assembly_of('<prompt schema="s"> and ask</prompt>', plain) is None
    # But a gap is one
    assert assembly_of('<prompt schema="s">?</prompt>') is not None


@pytest.mark.parametrize(
    ("share", "spans"),
    [
        (0.0, ()),
        # of a's 14 tokens 2, of c's 5 1, of the 3 at the end 1
        (0.1, ((5, 7), (22, 23), (27, 28))),
        # a's 7: all of its first text, 2 of what stands behind the argument
        (0.5, ((5, 10), (13, 15), (22, 25), (27, 29))),
        (1.0, ((5, 10), (13, 21), (21, 22), (22, 27), (27, 30))),
    ],
)
def test_a_share_of_each_module_is_computed_in_place(
    share: float, spans: tuple[tuple[int, int], ...]
) -> None:
    found = assembly_of('<prompt schema="s"><a p="xyz"/><c/>?</prompt>', recipe=Recipe(share=share))
    assert found is not None and found.recomputed == spans
    computed = {at for begin, end in found.holes(31, found.parts) for at in range(begin, end)}
    assert computed == {10, 11, 12, 30} | {at for begin, end in spans for at in range(begin, end)}


def test_the_papers_pass_has_what_is_computed_last() -> None:
    found = assembly_of('<prompt schema="s"><a p="xyz"/><c/>?</prompt>', recipe=Recipe(see_later=True))
    assert found is not None and text(found) == "Beginfirstbehind itshortendxyz?"
    assert list(found.positions) == [
        *range(10),
        *range(15, 24),
        *range(24, 29),
        *range(32, 35),
        10,
        11,
        12,
        35,
    ]
    assert found.holes(31, found.parts) == [(27, 31)]


def test_a_module_is_encoded_after_the_beginning_with_placeholders() -> None:
    made = {job.name: job.assembly for job in jobs(encoding_of(), salt=SALT)}
    assert list(made) == [
        "s: the beginning",
        "s: a beginning",
        "s: b beginning",
        "s: c beginning",
        "s: . beginning",
    ]
    beginning, a = made["s: the beginning"], made["s: a beginning"]
    assert (text(beginning), list(beginning.positions), beginning.exact) == ("Begin", list(range(5)), 5)
    assert list(a.tokens) == [*b"Beginfirst", *[256] * 5, *b"behind it"]
    assert list(a.positions) == list(range(24))
    assert places(a.parts) == [(0, 5, 0)] and a.exact == 5
    assert [(kept.first, kept.count, kept.position, kept.exact) for kept in a.kept] == [
        (5, 5, 5, False),
        (15, 8, 15, False),
        (23, 1, 23, False),
    ]
    assert [kept.parent for kept in a.kept] == [beginning.kept[0].key, a.kept[0].key, a.kept[1].key]
    assert beginning.kept[0].parent == ROOT and beginning.kept[0].exact
    assert list(made["s: c beginning"].positions) == [*range(5), *range(24, 29)]
    assert list(made["s: . beginning"].positions) == [*range(5), *range(32, 35)]


def test_alone_a_module_is_encoded_at_its_positions_after_nothing() -> None:
    made = {job.name: job.assembly for job in jobs(encoding_of(method=Method.ALONE), salt=SALT)}
    c = made["s: c alone"]
    assert (text(c), list(c.positions), c.parts, c.exact) == ("short", list(range(24, 29)), (), 0)


def test_a_scaffold_is_encoded_together() -> None:
    schema = SCHEMA.replace("end<", 'end<scaffold modules="a c"/><')
    made = {job.name: job.assembly for job in jobs(encoding_of(schema), salt=SALT)}
    both = made["s: a+c beginning"]
    assert list(both.tokens) == [*b"Beginfirst", *[256] * 5, *b"behind itshort"]
    assert list(both.positions) == list(range(29))
    together = assembly_of('<prompt schema="s"><a p="x"/><c/>?</prompt>', schema)
    assert together is not None
    assert together.parts[4].key == both.kept[-1].key != made["s: c beginning"].kept[0].key


def test_names_of_owners_are_short_enough_and_the_tenants() -> None:
    assert owner_name("s", "a", ROOT) == OWNER_PREFIX + "s/a"
    assert owner_name("s", "a", ChunkKey(b"\1" * 32)) != owner_name("s", "a", ChunkKey(b"\2" * 32))
    assert len(owner_name("s" * 300, "a", ROOT).encode()) <= 256


@pytest.mark.parametrize(
    ("tokens", "positions", "parts", "says"),
    [
        ((1,), (), (), "have 0 positions"),
        ((), (), (), "0 tokens"),
        ((1, 2), (0, 1), (Part(ChunkKey(b"k"), 0, 3),), "overlaps"),
        ((1, 2), (0, 1), (Part(ChunkKey(b"k"), 0, 2), Part(ChunkKey(b"l"), 1, 1)), "overlaps"),
    ],
)
def test_what_is_no_prompt_is_refused(
    tokens: tuple[int, ...], positions: tuple[int, ...], parts: tuple[Part, ...], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Assembly(tokens, positions, 2, parts)


def test_spans() -> None:
    assert missing_spans(b"\0\1\1\0\0") == [(0, 1), (3, 5)]
    assert missing_spans(b"\1") == [] == missing_spans(b"")


def test_the_pool_calls_equal_kv_alike_and_no_other() -> None:
    salt = bytes(32)

    def chain(assembly: Assembly | None) -> list[bytes]:
        assert assembly is not None
        return list(assembly.chain(8, salt, ROOT))

    one = assembly_of('<prompt schema="s"><a p="xyz"/><c/>?</prompt>')
    same = chain(assembly_of('<prompt schema="s"><a p="xyz"/><c/>? And why?</prompt>'))
    assert chain(one)[:3] == same[:3] and len(same) == 4 + 1
    assert one is not None
    first = one.parts[1]
    others = [
        replace(one, positions=(*one.positions[:7], *(at + 1 for at in one.positions[7:]))),
        replace(one, parts=(one.parts[0], replace(first, key=ChunkKey(b"other")), *one.parts[2:])),
        replace(one, parts=(one.parts[0], replace(first, delta=1), *one.parts[2:])),
        replace(one, parts=(one.parts[0], *one.parts[2:])),
        replace(one, recomputed=((6, 7),)),
        replace(one, tokens=(*one.tokens[:7], 1, *one.tokens[8:])),
    ]
    firsts = [chain(other)[0] for other in (one, *others)]
    assert len(set(firsts)) == len(firsts)
    # What is exact has the keys of any prompt
    whole = replace(one, exact=16)
    assert chain(whole)[:2] == exact_chain(salt, one.tokens[:16], 8)
    assert one.chain(8, salt, ChunkKey(b"x" * 32))[0] != chain(one)[0]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_each_token_that_is_computed_sees_every_slot_before_its_own_once(data: st.DataObject) -> None:
    """Whatever of the parts is there, and whatever of them is computed all the same."""
    at, parts = 0, []
    for number in range(data.draw(st.integers(1, 6))):
        at += data.draw(st.integers(0, 3))
        parts.append(
            Part(
                ChunkKey(bytes([number]) * 32),
                at,
                data.draw(st.integers(1, 6)),
                data.draw(st.integers(-2, 2)),
            )
        )
        at = parts[-1].end
    count = at + data.draw(st.integers(0, 3))
    positions, position = [], 0
    for _ in range(count):
        position += data.draw(st.integers(0, 2))
        positions.append(position)
        position += 1
    spans = sorted(data.draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(1, 3)), max_size=3)))
    recomputed, end = [], 0
    for begin, size in spans:
        if begin >= end:
            end = min(count, begin + size)
            recomputed.append((begin, end))
    end = position + data.draw(st.integers(0, 2))
    assembly = Assembly(tuple(range(count)), tuple(positions), end, tuple(parts), tuple(recomputed))
    there = [part for part in parts if data.draw(st.booleans())]
    chain = assembly.split(there)
    own = list(chain.tokens)  # a token is its slot
    assert [chain.position(number) for number in range(len(own) + 1)] == [*(positions[s] for s in own), end]
    part_of = {part.key: part for part in parts}
    for number, slot in enumerate(own):
        seen = own[: number + 1]
        for one in chain.seen:
            part = part_of[one.key]
            if one.at <= number:
                seen += range(part.first + one.begin, part.first + one.end)
            assert one.position == positions[part.first + one.begin] and one.delta == part.delta
        assert sorted(seen) == list(range(slot + 1))
    assert own == [slot for begin, end in assembly.holes(count, there) for slot in range(begin, end)]
