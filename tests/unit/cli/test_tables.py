import pytest

from kvstore.cli.tables import age, counted, name, peer_text, plain, size, table
from kvstore.v1 import stats_pb2


def test_table():
    text = table(("name", "count", "yes"), [("a", 1234, True), ("bcdef", 5, False)])
    assert text == "name   count  yes\na      1,234  yes\nbcdef      5  no"
    assert table(("a", "b"), []) == "a  b"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1.0 GiB"), (3 << 40, "3.0 TiB")],
)
def test_size(number, text):
    assert size(number) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(0, "0.0s"), (1_500, "1.5s"), (61_000, "1m 1s"), (3_660_000, "1h 1m"), (93_784_000, "1d 2h")],
)
def test_age(milliseconds, text):
    assert age(milliseconds) == text


@pytest.mark.parametrize(
    ("session", "text"),
    [(b"talk", "talk"), (b"\xff", "hex:ff"), (b"a\x1b", "hex:611b"), (b"hex:1", "hex:6865783a31")],
)
def test_a_name_can_be_given_again(session, text):
    assert name(session) == text


def test_a_terminal_obeys_no_peer():
    assert "\x1b" not in peer_text("\x1b[2J")
    assert "\n" not in peer_text("a\nb")


def test_a_name_or_a_reason_of_a_peer_is_shown_whole():
    """A name that is cut is one that no command takes; the end of a reason tells what happened."""
    for text in ("org/a-model-with-a-long-name-" * 4, "registry away: ConnectionError: Error 111 " * 5):
        assert peer_text(text) == text
    assert len(peer_text("a" * 1_000_000)) < 3_000


def test_counted():
    assert [counted(number, "chunk") for number in (0, 1, 1234)] == ["0 chunks", "1 chunk", "1,234 chunks"]


def test_plain_keeps_numbers():
    reply = stats_pb2.StatsReply(uptime_ms=1 << 60, boot_id=b"\xab", counters={"b": 1 << 60, "a": 1})
    reply.pools.add(free=1 << 60)
    found = plain(reply)
    assert (found["uptime_ms"], found["boot_id"], found["pools"][0]["free"]) == (1 << 60, "ab", 1 << 60)
    assert list(found["counters"].items()) == [("a", 1), ("b", 1 << 60)]
    assert found["arena"]["bytes"] == 0
