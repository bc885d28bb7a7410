"""Keys of a schema's chunks, and what an edit encodes again (section 3.3)."""

import pytest

from kvstore.keys import exact_chain, exact_key
from kvstore.promptcache import Encoding, Layout, Method, changes, parse_prompt, parse_schema
from kvstore.promptcache.encoding import Changes

from .words import Words

SALT = b"s" * 32
WORDS = Words("chatml")


def encoding(
    inner: str, method: Method = Method.BEGINNING, salt: bytes = SALT, chunk_tokens: int = 4
) -> Encoding:
    layout = Layout(parse_schema(f"<schema name=s>{inner}</schema>"), WORDS)
    return Encoding(layout, salt, chunk_tokens=chunk_tokens, method=method)


BASE = "c1 c2 c3 c4 c5 <module name=a>a1 a2 a3 a4 a5 <param name=p len=3/> a6</module><module name=b>b1 b2</module> z"


def test_chunks_are_cut_at_parameters_and_end_in_partial_ones() -> None:
    made = encoding(BASE)
    chunks = [chunk for chunks in made.units["a",].chunks.values() for chunk in chunks]
    assert [(WORDS.text(chunk.tokens), chunk.position) for chunk in chunks] == [
        ("a1 a2 a3 a4", 5),
        ("a5", 9),
        ("a6", 13),
    ]
    assert [(len(chunk.tokens), chunk.position) for chunk in made.beginning] == [(4, 0), (1, 4)]
    assert len(set(made.keys())) == len(list(made.keys())) == 2 + 3 + 1 + 1


def test_the_beginning_has_the_keys_of_any_prompt_that_begins_so() -> None:
    made = encoding(BASE)
    tokens = [token for chunk in made.beginning for token in chunk.tokens]
    first = exact_chain(SALT, tokens, 4)
    assert [chunk.key for chunk in made.beginning] == [*first, exact_key(SALT, first[-1], tokens[4:])]


@pytest.mark.parametrize(
    ("edited", "expected"),
    [
        (BASE, Changes(False, (("a",), ("b",), ()), {}, (), ())),
        # text of a, of the same length: b and z stay
        (BASE.replace("a2", "x2"), Changes(False, (("b",), ()), {}, (("a",),), ())),
        # its last word: so too
        (BASE.replace("a6", "x6"), Changes(False, (("b",), ()), {}, (("a",),), ())),
        # a is longer: b and z move
        (BASE.replace("a6", "a6 a7"), Changes(False, (), {("b",): 1, (): 1}, (("a",),), ())),
        # another length of the parameter changes what a6 attended to and where it stands
        (BASE.replace("len=3", "len=2"), Changes(False, (), {("b",): -1, (): -1}, (("a",),), ())),
        # an edited beginning changes all that attended to it
        (BASE.replace("c3", "x3"), Changes(True, (), {}, (("a",), ("b",), ()), ())),
        # a module more
        (
            BASE.replace(" z", "<module name=d>d1</module> z"),
            Changes(False, (("a",), ("b",)), {(): 1}, (("d",),), ()),
        ),
        (
            BASE.replace("<module name=b>b1 b2</module>", ""),
            Changes(False, (("a",),), {(): -2}, (), (("b",),)),
        ),
        # another name of a parameter changes no KV
        (BASE.replace("name=p", "name=q"), Changes(False, (("a",), ("b",), ()), {}, (), ())),
    ],
)
def test_what_an_edit_encodes_again(edited: str, expected: Changes) -> None:
    assert changes(encoding(BASE), encoding(edited)) == expected


def test_no_key_of_an_edited_text_is_one_of_the_old() -> None:
    """What changed in any way has keys that it never had."""
    old = set(encoding(BASE).units["a",].keys)
    for edited in ("a1", "a3", "a5", "a6"):
        new = encoding(BASE.replace(edited, "other")).units["a",].keys
        first = next(index for index, key in enumerate(new) if key not in old)
        assert not old & set(new[first:])


def test_alone_a_module_does_not_depend_on_the_beginning() -> None:
    old, new = (encoding(text, Method.ALONE) for text in (BASE, BASE.replace("c3", "x3")))
    assert changes(old, new) == Changes(True, (("a",), ("b",), ()), {}, (), ())
    assert not set(old.units["a",].keys) & set(encoding(BASE).units["a",].keys)


def test_shared_modules_have_one_kv_in_many_schemas() -> None:
    first = encoding(
        "<system>S T</system><user>one two three <module name=d>d1 d2</module></user>", Method.SHARED
    )
    second = encoding("<system>S T</system><user>four <module name=e>d1 d2</module></user>", Method.SHARED)
    other = encoding("<system>S X</system><user>four <module name=e>d1 d2</module></user>", Method.SHARED)
    assert first.units["d",].keys == second.units["e",].keys != other.units["e",].keys
    assert [chunk.position for chunk in first.units["d",].chunks[1]] == [first.layout.system] == [5]
    prompt = parse_prompt("<prompt schema=s><d/></prompt>", first.layout.schema)
    entries = [entry for _, entries in first.entries(first.layout.place(prompt)) for entry in entries]
    assert [entry.delta for entry in entries] == [0, 0, 0, 5]


def test_tenants_and_models_share_no_key() -> None:
    assert not set(encoding(BASE).keys()) & set(encoding(BASE, salt=b"t" * 32).keys())


def test_the_entries_of_a_prompt() -> None:
    made = encoding(BASE)
    prompt = parse_prompt("<prompt schema=s><a p=x/> t1 t2 <b/></prompt>", made.layout.schema)
    found = made.entries(made.layout.place(prompt))
    assert [
        (run.position, [(entry.chunk.position + entry.delta, len(entry.chunk.tokens)) for entry in entries])
        for run, entries in found
    ] == [(0, [(0, 4), (4, 1)]), (5, [(5, 4), (9, 1)]), (13, [(13, 1)]), (16, [(16, 2)]), (18, [(18, 1)])]
    assert [entry.delta for _, entries in found for entry in entries] == [0, 0, 0, 0, 0, 2, 2]
    assert [entry.exact for _, entries in found for entry in entries] == [True, True, *[False] * 5]


def test_a_scaffold_is_used_when_all_its_members_are_imported() -> None:
    made = encoding("c <module name=a>a1</module><module name=b>b1</module><scaffold modules='a b'/>")

    def keys(imports: str) -> list:
        prompt = parse_prompt(f"<prompt schema=s>{imports}</prompt>", made.layout.schema)
        return [
            entry.chunk.key for _, entries in made.entries(made.layout.place(prompt)) for entry in entries
        ]

    (scaffold,) = made.scaffolds
    own = {path: unit.keys for path, unit in made.units.items()}
    assert keys("<a/>")[1:] == own["a",]
    assert keys("<b/>")[1:] == own["b",]
    assert keys("<a/><b/>")[1:] == scaffold.keys
    # b attended to a: an edit of a changes both in the scaffold, and b alone not
    edited = encoding("c <module name=a>x1</module><module name=b>b1</module><scaffold modules='a b'/>")
    assert not set(edited.scaffolds[0].keys) & set(scaffold.keys)
    assert edited.units["b",].keys == own["b",]
    assert scaffold.keys[0] == own["a",][0]  # a attended to nothing else, there as here


def test_a_parameters_scaffold_is_stored_and_placeholders_are_not() -> None:
    made = encoding("<module name=a><param name=p len=6 scaffold='s1 s2 s3 s4 s5'/> a1</module>")
    chunks = [chunk for chunks in made.units["a",].chunks.values() for chunk in chunks]
    assert [(len(chunk.tokens), chunk.position) for chunk in chunks] == [(4, 0), (1, 4), (1, 6)]
    without = encoding("<module name=a><param name=p len=6/> a1</module>")
    assert without.units["a",].keys[0] not in made.units["a",].keys


def test_modules_that_are_not_cached_have_no_chunks() -> None:
    made = encoding("c <module name=a cache=false>a1</module>")
    assert list(made.units) == []
    prompt = parse_prompt("<prompt schema=s><a/></prompt>", made.layout.schema)
    assert len(made.entries(made.layout.place(prompt))) == 1


def test_a_module_that_only_moved_can_be_served_with_the_kv_it_had() -> None:
    old, new = encoding(BASE), encoding(BASE.replace("a6", "a6 a7"))
    moved = new.moved_from([old])
    assert moved == {("b",): [old.units["b",]], (): [old.units[()]]}
    made = new.replaced({path: units[0] for path, units in moved.items()})
    prompt = parse_prompt("<prompt schema=s><a p=x/><b/></prompt>", new.layout.schema)
    found = [entry for _, entries in made.entries(made.layout.place(prompt)) for entry in entries]
    own = [entry for _, entries in new.entries(new.layout.place(prompt)) for entry in entries]
    assert [entry.chunk.tokens for entry in found] == [entry.chunk.tokens for entry in own]
    assert [entry.chunk.position + entry.delta for entry in found] == [
        entry.chunk.position + entry.delta for entry in own
    ]
    assert [entry.delta for entry in found] == [0] * 5 + [1, 1]
    assert [entry.delta for entry in own] == [0] * 7
    assert new.units["b",].keys != old.units["b",].keys  # and what `replaced` was asked of is as it was


def test_segments_of_a_module_that_moved_may_be_others() -> None:
    """An empty module within cuts its text in two, at the end of a chunk: the chunks are the same."""
    old = encoding("c <module name=a>a1 a2 a3 a4 a5 a6</module>")
    new = encoding(
        "c <union><module name=x>x1</module></union><module name=a>a1 a2 a3 a4<module name=e></module>a5 a6</module>"
    )
    assert len(new.units["a",].chunks) == 2 and len(old.units["a",].chunks) == 1
    (unit,) = new.moved_from([old])["a",]
    made = new.units["a",].encoded_as(unit)
    assert made.keys == old.units["a",].keys and made.start == old.units["a",].start
    assert [len(chunks) for chunks in made.chunks.values()] == [1, 1]


def test_an_edited_text_or_beginning_has_no_earlier_kv() -> None:
    for edited in (BASE.replace("a1", "x1"), BASE.replace("c3", "x3"), BASE):
        assert ("a",) not in encoding(edited).moved_from([encoding(BASE)])
