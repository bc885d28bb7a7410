"""The core replayed under a virtual clock: what a few turns get is known, and published figures come out again."""

import gzip
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.core import events as ev
from kvstore.core.chunks import TAIL
from kvstore.errors import BadRequest
from kvstore.replay import Trace, Turn, read_trace, replay
from kvstore.replay.machine import Machine

TRACES = Path(__file__).resolve().parents[4] / "shared/data/traces"


def trace(*chains: tuple[int, ...], step_ms: int = 1000) -> Trace:
    turns = [Turn(n * step_ms, chain, 64 * len(chain), session=chain[0]) for n, chain in enumerate(chains)]
    made = Trace("made", 64, turns)
    made.note_history()
    return made


def test_what_fits_is_hit_again() -> None:
    result = replay(trace((1, 2), (1, 2, 3), (4, 5), (1, 2, 3)), dram_chunks=8)
    assert (result.turns, result.chunks, result.hits_dram, result.hits_ssd) == (4, 10, 5, 0)
    assert (result.returning, result.returning_hit) == (2, 2)
    assert (result.tokens, result.tokens_hit) == (640, 320)


def test_only_the_leading_run_is_a_hit() -> None:
    """Two of the four chunks leave for those of another session; the end of the chain goes first."""
    result = replay(trace((1, 2, 3, 4), (11, 12), (1, 2, 3, 4)), dram_chunks=4, policy="lru")
    assert result.hits == 2


def test_a_prompt_that_ends_within_a_chunk_saves_a_tail() -> None:
    turns = Trace("made", 64, [Turn(0, (1, 2), 100), Turn(1, (3, 4), 128), Turn(2, (5, 6), 100, answer=(7,))])
    machine = Machine(
        turns, dram_chunks=8, ssd_chunks=0, policy="expected", chunk_bytes=1 << 20, ssd_bytes_per_s=1e9,
        ssd_latency_ms=0.0,
    )  # fmt: skip
    machine.run(look_ahead=0, warm_up=0)
    state = machine.store.state
    index = state.namespaces[machine.namespace].index
    keys = [*machine.keys_of(turns.turns[0]), *map(machine.keys.__getitem__, (3, 4, 5, 6, 7))]
    rows = [index[key] for key in keys]
    assert [state.chunks.tokens[row] for row in rows] == [64, 36, 64, 64, 64, 64, 64]
    assert [bool(state.chunks.flags[row] & TAIL) for row in rows] == [False, True, *[False] * 5]


def test_what_a_partial_chunk_grows_to_is_another_chunk_though_it_has_one_number() -> None:
    """Whoever makes a trace may number blocks by where they begin."""
    turns = [Turn(0, (1, 2), 100), Turn(1, (1, 2), 100), Turn(2, (1, 2), 110), Turn(3, (1, 2, 3), 192)]
    assert replay(Trace("made", 64, turns), dram_chunks=8).hits == 2 + 1 + 1
    assert replay(Trace("made", 64, turns), dram_chunks=8, look_ahead=3).hits == 2 + 1 + 1


def test_answers_are_saved_with_their_prompt() -> None:
    turns = [Turn(0, (1,), 64, 64, answer=(2,)), Turn(1000, (1, 2, 3), 192)]
    assert replay(Trace("made", 64, turns), dram_chunks=8).hits == 2


def test_a_look_ahead_keeps_what_comes_next() -> None:
    """Least recently used goes what the next turn but one asks for; the scheduler knows better."""
    turns = trace((1, 2), (11, 12), (21, 22), (1, 2))
    assert replay(turns, dram_chunks=4).hits == 0
    assert replay(turns, dram_chunks=4, look_ahead=3).hits == 2
    assert replay(turns, dram_chunks=4, look_ahead=3, policy="lru").hits == 0


def test_a_job_leaves_the_queue_before_it_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: set[int] = set()
    queues: list[set[int]] = []
    apply = Machine.apply

    def noted(machine: Machine, event: ev.Event) -> None:
        if isinstance(event, ev.PublishQueue):
            waiting.difference_update(int.from_bytes(job, "little") for job in event.removed)
            waiting.update(int.from_bytes(hint.job, "little") for hint in event.hints)
            queues.append(set(waiting))
        apply(machine, event)

    monkeypatch.setattr(Machine, "apply", noted)
    replay(trace((1,), (2,), (3,), (4,)), dram_chunks=4, look_ahead=2)
    assert queues == [{1, 2}, {2, 3}, {3}, set()]


def test_the_ssd_serves_what_left_dram_and_takes_its_time() -> None:
    turns = trace((1, 2), (11, 12), (21, 22), (1, 2))
    mib = 1 << 20
    result = replay(turns, dram_chunks=4, ssd_chunks=16, ssd_bytes_per_s=1000 * mib / 10)
    assert (result.hits_dram, result.hits_ssd) == (0, 2)
    assert result.ssd_bytes_written == 6 * mib
    assert result.ssd_bytes_read == 2 * mib
    assert result.waited_ms == 20  # two chunks of 10 ms
    ahead = replay(turns, dram_chunks=4, ssd_chunks=16, ssd_bytes_per_s=1000 * mib / 10, look_ahead=1)
    assert (ahead.hits_dram, ahead.hits_ssd, ahead.waited_ms) == (2, 0, 0)


def test_lookups_without_a_message_are_told_with_the_next_request_or_soon() -> None:
    """So a hot set that is only ever looked up there stays, as if it had been asked for: LRU says so."""
    hot = (1, 2, 3)
    chains = [hot, *[turn for n in range(40) for turn in (hot, (100 + 2 * n, 101 + 2 * n))]]
    told = {
        delay: replay(trace(*chains), dram_chunks=6, policy="lru", touched_ms=delay)
        for delay in (None, 50.0, 900.0)
    }
    assert {result.hits for result in told.values()} == {3 * 40}
    assert told[50.0].counters["lookups_without_message"] == len(chains)
    assert not told[None].counters.get("lookups_without_message")


def test_what_is_on_ssd_is_asked_for_though_there_is_a_directory() -> None:
    chains = [(1, 2), (3, 4), (5, 6), (1, 2)]
    named: dict[str, Any] = {"dram_chunks": 4, "ssd_chunks": 20, "ssd_bytes_per_s": 1e9}
    result = replay(trace(*chains), policy="lru", touched_ms=50.0, **named)
    assert (result.hits_ssd, result.hits) == (2, 2)


def test_the_warm_up_is_served_and_not_counted() -> None:
    result = replay(trace((1, 2), (1, 2, 3)), dram_chunks=8, warm_up=1)
    assert (result.turns, result.chunks, result.hits) == (1, 3, 2)


def test_a_turn_larger_than_dram_is_served_as_far_as_that_goes() -> None:
    result = replay(trace(tuple(range(40)), tuple(range(40))), dram_chunks=8)
    assert result.turns == 2


def test_no_dram_is_refused() -> None:
    with pytest.raises(BadRequest, match="dram_chunks"):
        replay(trace((1,)), dram_chunks=0)


def recording(tmp_path: Path, *lines: dict[str, Any]) -> Trace:
    path = tmp_path / "trace"
    path.write_text("".join(json.dumps({"n": 0, "c": 64, "b": 4096, **line}) + "\n" for line in lines))
    return read_trace(path, "recorded")


def test_of_an_engine_what_one_looks_up_and_another_loads_is_one_turn(tmp_path: Path) -> None:
    """A scheduler (worker 0) looks prompts up, the ranks (1, 2) load and save; another engine does the same."""
    one, two = {"g": 0}, {"g": 1}
    trace = recording(
        tmp_path,
        {"t": 0, "w": 0, "ask": [1, 2, 3], **one},
        {"t": 5, "w": 0, "ask": [1, 2, 8, 9], **one},
        {"t": 6, "w": 3, "ask": [1, 2], **two},
        {"t": 9, "w": 1, "ask": [1, 2], **one},
        {"t": 10, "w": 2, "ask": [1, 2], **one},
        {"t": 20, "w": 1, "save": [3, 4], "after": 2, **one},
        {"t": 21, "w": 2, "save": [3, 4], "after": 2, **one},
        {"t": 22, "w": 1, "save": [8, 9, 10], "after": 2, **one},
        {"t": 30, "w": 1, "save": [5], "after": 4, **one},
        {"t": 70_000, "w": 1, "ask": [1, 2], **one},
    )
    assert [(turn.at_ms, [*turn.chunks], [*turn.answer]) for turn in trace] == [
        (0, [1, 2, 3], [4, 5]),
        (5, [1, 2, 8, 9], [10]),
        (6, [1, 2], []),
        (70_000, [1, 2], []),
    ]


def test_what_a_rank_loads_may_be_told_before_what_its_scheduler_looked_up(tmp_path: Path) -> None:
    of = {"g": 0}
    trace = recording(
        tmp_path,
        {"t": 0, "w": 1, "ask": [1, 2], **of},
        {"t": 40, "w": 0, "ask": [1, 2, 3], **of},
        {"t": 50, "w": 1, "save": [3, 4], "after": 2, **of},
        {"t": 3_000, "w": 0, "ask": [1, 2, 3, 4, 5], **of},
        {"t": 3_001, "w": 0, "ask": [1, 2, 3], **of},
    )
    assert [(turn.at_ms, [*turn.chunks], [*turn.answer]) for turn in trace] == [
        (0, [1, 2, 3], [4]),
        (3_000, [1, 2, 3, 4, 5], []),
        (3_001, [1, 2, 3], []),
    ]
    assert [turn.session for turn in trace] == [0, 0, 0]


def test_one_prompt_again_and_again_is_a_turn_each_time(tmp_path: Path) -> None:
    """Whoever is heard first; a rank may load it in parts."""
    of = {"g": 0}
    asks = [(0, 0, [1, 2]), (1, 1, [1]), (2, 1, [2]), (10, 1, [1, 2]), (11, 0, [1, 2]), (20, 0, [1, 2])]
    trace = recording(tmp_path, *({"t": t, "w": w, "ask": ask, **of} for t, w, ask in asks))
    assert [(turn.at_ms, [*turn.chunks]) for turn in trace] == [(0, [1, 2]), (10, [1, 2]), (20, [1, 2])]


def test_a_recording_that_knows_no_groups_has_a_turn_for_each_lookup(tmp_path: Path) -> None:
    trace = recording(
        tmp_path,
        {"t": 0, "w": 0, "ask": [1, 2]},
        {"t": 1, "w": 1, "ask": [1, 2]},
        {"t": 2, "w": 1, "save": [3]},
        {"t": 2, "w": 0, "save": [4]},
    )
    assert [([*turn.chunks], [*turn.answer]) for turn in trace] == [([1, 2], [4]), ([1, 2], [3])]


@pytest.mark.parametrize(
    ("dram_chunks", "look_ahead", "hit_rate"),
    [
        (10_000, 0, 0.2116),
        pytest.param(3_000, 0, 0.0653, marks=pytest.mark.slow),
        pytest.param(1_000, 100, 0.0710, marks=pytest.mark.slow),
    ],
)
def test_a_real_trace_gives_the_known_figures(dram_chunks: int, look_ahead: int, hit_rate: float) -> None:
    """Of LRU they are published with the trace; those of the look-ahead were measured with this core before."""
    path = TRACES / "mooncake_conversation.jsonl.zst"
    if not path.exists():
        pytest.skip(f"no {path.name}: the shared data are not on this machine")
    pytest.importorskip("zstandard", reason="zstandard is not installed: the trace is compressed")
    result = replay(
        read_trace(path, "mooncake"),
        dram_chunks=dram_chunks,
        look_ahead=look_ahead,
        policy="hints",
        whole=True,
    )
    assert round(result.hit_rate, 4) == hit_rate


def test_mooncake_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(0, 1100, [1, 2, 3]), (0, 600, [9, 10]), (3000, 1600, [1, 2, 4, 5])]
    path.write_text(
        "".join(
            json.dumps({"timestamp": at, "input_length": tokens, "output_length": 7, "hash_ids": ids})
            + "\n\n"
            for at, tokens, ids in rows
        )
    )
    read = read_trace(path, "mooncake")
    assert [list(turn.chunks) for turn in read] == [[1, 2, 3], [9, 10], [1, 2, 4, 5]]
    assert [turn.at_ms for turn in read] == [0, 1500, 3000], "one step of the clock is spread evenly"
    assert [turn.session for turn in read] == [0, 1, 0]
    assert [turn.history for turn in read] == [0, 0, 2]
    assert [read.last_tokens(turn) for turn in read] == [76, 88, 64]


def test_conversations_grow_and_outgrow_the_window(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"id": "a", "turns": [[64, 64], [64, 64], [64, 64]]}\n')
    grown = [list(turn.chunks) for turn in read_trace(path, "sharegpt")]
    assert [len(chunks) for chunks in grown] == [1, 3, 5]
    assert grown[2][:3] == grown[1]
    cut = read_trace(path, "sharegpt", window=256)
    assert [list(turn.chunks) for turn in cut] == [*grown[:2], grown[2][2:]]
    assert [turn.history for turn in cut] == [0, 2, 2]
    fresh = read_trace(path, "sharegpt", window=256, invalidates=True)
    left = {chunk for turn in fresh.turns[:2] for chunk in (*turn.chunks, *turn.answer)}
    assert not set(fresh.turns[2].chunks) & left
    assert fresh.turns[2].history == 2
    assert [turn.at_ms for turn in fresh] == [turn.at_ms for turn in cut]


def test_agents_blocks_are_of_their_session_and_grouped(tmp_path: Path) -> None:
    path = tmp_path / "agents.jsonl"
    inner = [{"t": 1.0, "in": 64, "out": 1, "h": [[90, 1]]}]
    first = [{"t": 0.0, "in": 256, "out": 5, "h": [[1, 4]]}, {"t": 2.0, "in": 0, "out": 0, "requests": inner}]
    second = {"t": 9.0, "in": 320, "out": 5, "h": [[1, 5]]}
    rows = [{"id": "x", "requests": [*first, second]}, {"id": "y", "requests": [second]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_trace(path, "agentic", chunk_tokens=128)
    by_session = {s: [list(t.chunks) for t in read if t.session == s] for s in range(3)}
    assert by_session[0] == [[0, 1], [0, 1, 2]]
    assert len(by_session[1]) == 1 and not set(by_session[1][0]) & {0, 1, 2}
    assert not set(by_session[2][0]) & {0, 1, 2, 3}


def test_azure_and_lmcache_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,130,109\n"
    )
    read = read_trace(azure, "azure")
    assert [(turn.at_ms, len(turn.chunks), turn.output_tokens) for turn in read] == [
        (0, 5, 44),
        (4314, 2, 109),
    ]
    agents = tmp_path / "agents.jsonl"
    rows = [("s", 5_000_000, "x" * 200), ("s", 7_000_000, "x" * 300), ("t", 8_000_000, "y" * 64)]
    agents.write_text(
        "".join(
            json.dumps({"timestamp": at, "input": text, "output": "", "session_id": name}) + "\n"
            for name, at, text in rows
        )
    )
    read = read_trace(agents, "lmcache")
    assert [(turn.at_ms, len(turn.chunks), turn.history) for turn in read] == [
        (0, 3, 0),
        (2000, 4, 3),
        (3000, 1, 0),
    ]


MOONCAKE = '{"timestamp": 0, "input_length": 512, "hash_ids": [1]}\n'


def mooncake_with(**fields: str) -> tuple[str, str, str]:
    name = next(iter(fields))
    row = {"timestamp": "0", "input_length": "512", "hash_ids": "[1]"} | fields
    text = ", ".join(f'"{field}": {text}' for field, text in row.items())
    return "mooncake", MOONCAKE + "{" + text + "}\n", f"line 2.*{name} is no"


AGENTIC = '{"requests": [%s]}\n'
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,%s\n"
RECORDED = '{"t": 1, "w": 0, "n": 0, "c": %s, "b": 4096, "ask": %s}\n'


@pytest.mark.parametrize(
    ("format", "text", "said"),
    [
        ("mooncake", '{"timestamp": 1}\n', "line 1"),
        ("mooncake", "no json\n", "is not JSON"),
        ("mooncake", "[" * 100_000, "is nested too deep"),
        ("mooncake", "\n", "holds no turn"),
        ("mooncake", "[1]\n", "has no timestamp"),
        *(
            mooncake_with(timestamp=value)
            for value in ('"x"', "null", "NaN", "Infinity", "-1", "1e30", "true")
        ),
        *(mooncake_with(input_length=value) for value in ("-5", "1e300", "1.5", "null", "99999999999")),
        *(
            mooncake_with(hash_ids=value)
            for value in ("1", '["a"]', "[[1]]", "[99999999999999999999]", "null")
        ),
        mooncake_with(output_length='"many"'),
        ("agentic", AGENTIC % '{"t": 0, "in": 1, "out": 1, "h": [[0, 999999999999]]}', "h is no count"),
        ("agentic", AGENTIC % '{"t": 0, "in": 1, "out": 1, "h": [[0]]}', "h is no list of runs"),
        ("agentic", AGENTIC % '{"t": 0, "in": 1, "out": 1}', "has no h"),
        ("agentic", AGENTIC % '{"t": 0, "requests": [3]}', "requests has no t"),
        ("agentic", '{"requests": {"t": 1}}\n', "requests is no list"),
        ("sharegpt", '{"turns": [[1, 2, 3]]}\n', "turns is no list of pairs"),
        ("sharegpt", '{"turns": [["1", 2]]}\n', "turns is no count"),
        ("sharegpt", '{"turns": [[1e9, 2]]}\n', "turns is no count"),
        ("lmcache", '{"timestamp": 1, "session_id": [], "input": "a"}\n', "session_id is no"),
        ("lmcache", '{"timestamp": 1, "session_id": 1, "input": 7}\n', "input is no text"),
        ("recorded", RECORDED % (0, "[1]"), "c is no count"),
        ("recorded", RECORDED % (64, '["1"]'), "ask is no whole number"),
        ("recorded", '{"kvstore_trace": 1}\n', "holds no lookup"),
        ("recorded", "[]\n", "has no n"),
        ("azure", "A,B\n1,2\n", "has no column TIMESTAMP, but: A, B"),
        ("azure", AZURE % "-1,2", "ContextTokens is no whole number"),
        ("azure", AZURE % "1", "GeneratedTokens is no whole number"),
        ("azure", AZURE % "99999999999,1", "ContextTokens is no count"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "TIMESTAMP is no time"),
        ("nonsense", "", "known: mooncake"),
        (
            "mooncake",
            '{"timestamp": -7, "input_length": 512, "hash_ids": [1]}\n',
            "timestamp is no time .*: -7 ",
        ),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": "5", "hash_ids": [1]}\n',
            "input_length is no .*: '5' ",
        ),
        ("mooncake", '{"timestamp": 0, "input_length": 512, "hash_ids": {"a": 1}}\n', ': {"a": 1} '),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 512, "hash_ids": "%s"}\n' % ("x" * 999),
            r": 'x{39}\.\.\. ",
        ),
        ("lmcache", '{"timestamp": 1, "session_id": null, "input": "a"}\n', "session_id is no .*: null "),
        ("recorded", RECORDED % (64, "[]"), "holds no lookup .*record for longer"),
    ],
)
def test_what_cannot_be_read_says_where_and_why(tmp_path: Path, format: str, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(BadRequest, match=said):
        read_trace(path, format)


FIRST_LINES = {
    "mooncake": MOONCAKE,
    "agentic": AGENTIC % '{"t": 0, "in": 64, "out": 1, "h": [[0, 1]]}',
    "sharegpt": '{"turns": [[64, 1]]}\n',
    "azure": AZURE % "64,1",
    "lmcache": '{"timestamp": 1, "session_id": 1, "input": "a", "output": "b"}\n',
    "recorded": '{"kvstore_trace": 1, "started": 0}\n' + RECORDED % (64, "[1]"),
}


@pytest.mark.parametrize("given", FIRST_LINES)
@pytest.mark.parametrize("named", FIRST_LINES)
def test_a_trace_under_another_formats_name_says_which_it_is(tmp_path: Path, given: str, named: str) -> None:
    path = tmp_path / "trace"
    path.write_text(FIRST_LINES[given])
    if given == named:
        assert len(read_trace(path, named)) == 1
        return
    with pytest.raises(BadRequest, match="trace, line 1") as refused:
        read_trace(path, named)
    assert refused.value.remedy == f"--format {given}"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (MOONCAKE + "[]\n", "mend the line"),
        (MOONCAKE + FIRST_LINES["sharegpt"], "mend the line"),
        (MOONCAKE.replace("0", "-1"), "mend the line"),
        ("[\n" + MOONCAKE + "]\n", "jq -c"),
        ("[" + MOONCAKE.strip() + "]", "jq -c"),
        ('{"timestamp": 0}\n', "another --format than mooncake.* known: .*sharegpt"),
    ],
)
def test_the_remedy_fits_what_is_wrong(tmp_path: Path, text: str, remedy: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(BadRequest) as refused:
        read_trace(path, "mooncake")
    assert re.search(remedy, refused.value.remedy)


def test_a_value_that_is_nested_as_deep_as_can_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    for depth in range(900, 1_100):
        path.write_text('{"timestamp": 0, "input_length": 512, "hash_ids": %s}' % ("[" * depth + "]" * depth))
        with pytest.raises(BadRequest, match=r"nested too deep|is no whole number"):
            read_trace(path, "mooncake")


def test_chunks_may_have_any_number_of_64_bits(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    row = '{"timestamp": %d, "input_length": 1024, "hash_ids": [-1, -9223372036854775808]}\n'
    path.write_text(row % 0 + row % 1)
    trace = read_trace(path, "mooncake")
    assert replay(trace, dram_chunks=8).hits == 2


@pytest.mark.parametrize("blocks", [0, 1, 3, 5])
def test_blocks_of_another_length_are_not_taken_for_512_tokens(tmp_path: Path, blocks: int) -> None:
    """1,200 tokens are 2 whole blocks of 512 and a part of one, which a trace names or not."""
    path = tmp_path / "trace"
    row = {"timestamp": 0, "input_length": 1200, "hash_ids": list(range(blocks))}
    path.write_text(json.dumps(row) + "\n")
    if blocks == 3:
        assert len(read_trace(path, "mooncake")) == 1
        return
    with pytest.raises(BadRequest, match=r"hash_ids has .* of 512") as refused:
        read_trace(path, "mooncake")
    assert "--option chunk_tokens=N" in refused.value.remedy
    if blocks == 5:
        assert read_trace(path, "mooncake", chunk_tokens=256).chunk_tokens == 256


def test_a_recording_of_other_namespaces_names_them(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(RECORDED % (64, "[1]") + (RECORDED % (64, "[1]")).replace('"n": 0', '"n": 3'))
    with pytest.raises(BadRequest, match="no lookup of namespace 7") as refused:
        read_trace(path, "recorded", namespace=7)
    assert refused.value.remedy == "--option namespace=0; known: 0, 3"


def test_what_asked_for_nothing_is_not_the_namespace_with_most_lookups(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(3 * (RECORDED % (64, "[]")) + (RECORDED % (64, "[1]")).replace('"n": 0', '"n": 3'))
    assert len(read_trace(path, "recorded")) == 1


def test_rows_out_of_order_begin_at_0(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text((AZURE % "64,1") + "2023-11-16 18:15:45+02:00,64,1\n")
    assert [turn.at_ms for turn in read_trace(path, "azure")] == [0, 1000]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda whole: whole[:-1], "is cut off"),
        (lambda whole: whole[:20], "is cut off"),
        (lambda whole: whole + whole[:9], "is cut off"),
        (lambda whole: b"no zstd", "is no zstd file"),
        (lambda whole: whole + b"rest", "is no zstd file"),
        (lambda whole: b"", "holds no turn"),
        (lambda whole: whole + whole, ""),
    ],
)
def test_compressed_files_are_whole_or_refused(tmp_path: Path, content: Any, said: str) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "trace.zst"
    path.write_bytes(content(zstandard.ZstdCompressor().compress(1000 * MOONCAKE.encode())))
    if said:
        with pytest.raises(BadRequest, match=said):
            read_trace(path, "mooncake")
    else:
        assert len(read_trace(path, "mooncake")) == 2000


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(MOONCAKE.encode() + b"\xff\xfe")
    for format in ("mooncake", "azure"):
        with pytest.raises(BadRequest, match="is no text in UTF-8"):
            read_trace(path, format)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rate", value) for value in (0, -1.0, math.nan, math.inf, "x", True)),
        *(("sigma", value) for value in (-1, 1e9, math.nan)),
        ("think_median_s", 0),
        *(("seed", value) for value in ("x", -1, 1.5)),
        *(("sessions", value) for value in (-1, 1.5)),
        *(("window", value) for value in (-4, 1, 127)),
        *(("chunk_tokens", value) for value in (0, "x", math.nan, 1 << 40)),
        ("invalidates", "maybe"),
        ("path", 3),
        ("format", 3),
    ],
)
def test_options_of_readers_are_checked(tmp_path: Path, name: str, value: object) -> None:
    path = tmp_path / "trace"
    path.write_text('{"turns": [[100, 100], [100, 100]]}\n')
    with pytest.raises(BadRequest, match=name):
        read_trace(path, "sharegpt", **{name: value})
    assert read_trace(path, "sharegpt", rate=2, invalidates="true", window=128)


TABLE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,640,44\n2023-11-16 18:15:50.99,128,9\n"
)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: text.replace(",", ";").encode(),
        lambda text: text.replace(",", "\t").encode(),
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: (
            text.replace("TIMESTAMP", " timestamp").replace("ContextTokens", '"contexttokens"').encode()
        ),
        lambda text: gzip.compress(text.encode()),
        lambda text: gzip.compress(text[:50].encode()) + gzip.compress(text[50:].encode()),
        lambda text: bytes(pytest.importorskip("zstandard").compress(text.encode())),
    ],
    ids=["plain", "marked", "semicolons", "tabs", "windows", "names", "gzip", "members", "zstd"],
)
def test_a_table_is_read_however_it_was_written(tmp_path: Path, change: Callable[[str], bytes]) -> None:
    path = tmp_path / "trace"
    path.write_bytes(change(TABLE))
    trace = read_trace(path, "azure")
    assert [(turn.at_ms, turn.input_tokens) for turn in trace] == [(0, 640), (4_310, 128)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"time,prompt,answer\n1,2,3\n", "has no column TIMESTAMP, but: time, prompt, answer"),
        (b"\n", "holds no turn"),
        (b"", "holds no turn"),
        (gzip.compress(TABLE.encode())[:-9], "is cut off within its gzip data"),
        (gzip.compress(TABLE.encode()) + b"rest", "is no gzip file"),
        (b"\x1f\x8bnothing", "is no gzip file"),
        (TABLE.encode() + b"2023-11-16 18:15:50.99,many,9\n", "line 4"),
        (b"x" * (1 << 20), "has no column TIMESTAMP"),
    ],
    ids=["columns", "line", "empty", "cut", "rest", "magic", "row", "long"],
)
def test_a_table_that_is_none_says_why(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(BadRequest, match=says) as refused:
        read_trace(path, "azure")
    assert len(str(refused.value)) < 600, "nobody's terminal is flooded"
