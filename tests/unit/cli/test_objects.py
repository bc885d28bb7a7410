"""What doctor and put do when the daemon is not ready at once."""

from types import SimpleNamespace

import pytest

from kvstore.cli import objects
from kvstore.errors import Exhausted
from kvstore.types import GrantResult, Reason

FULL, GRANTED, BUSY = GrantResult.FULL, GrantResult.GRANTED, GrantResult.BUSY


class Store:
    """Answers one list of results after the other, the last one for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.aborted = 0

    def write(self, keys, *, parent):
        results = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return SimpleNamespace(results=results, abort=self._abort)

    def _abort(self):
        self.aborted += 1


def granted(store):
    return objects.granted(store, [b"k"])


def test_a_segment_that_is_on_its_way_is_waited_for(monkeypatch):
    monkeypatch.setattr(objects, "GRANT_POLL_S", 0.0)
    store = Store([FULL, FULL], [GRANTED, FULL], [GRANTED, GRANTED])
    assert granted(store).results == [GRANTED, GRANTED]
    assert store.aborted == 2  # what was granted of them is given back


@pytest.mark.parametrize(("patience_s", "answer"), [(0.0, [FULL]), (60.0, [BUSY])])
def test_what_does_not_come_is_told(monkeypatch, patience_s, answer):
    monkeypatch.setattr(objects, "GRANT_PATIENCE_S", patience_s)
    monkeypatch.setattr(objects, "GRANT_POLL_S", 0.0)
    assert granted(Store(answer)).results == answer


def put(monkeypatch, reason):
    """Seven pieces; the store says `reason` of the third when all are saved. What was written, piece by piece."""
    pieces = []

    class Batch:
        def __init__(self, keys):
            self.results = [GRANTED] * len(keys)

        def buffer(self, index):
            return self

        def __setitem__(self, place, piece):
            if piece:
                pieces.append(piece)

        def commit(self):
            return SimpleNamespace(error=None)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(objects, "PIECE_BYTES", 16)
    monkeypatch.setattr(objects, "granted", lambda namespace, keys, parent: Batch(keys))
    matched = SimpleNamespace(reasons=[Reason.NONE, Reason.NONE, reason, *[Reason.NONE] * 4])
    client = SimpleNamespace(open=lambda spec: SimpleNamespace(salt=bytes(32), match=lambda keys: matched))
    objects.put(client, b"x" * 100)
    return pieces


@pytest.mark.parametrize("reason", [Reason.NONE, Reason.ON_SSD])
def test_a_piece_is_no_copy_of_all_that_follows(monkeypatch, reason):
    """A file of a thousand pieces would be copied five hundred times."""
    pieces = put(monkeypatch, reason)
    assert len(pieces) == 7
    assert len({id(piece.obj) for piece in pieces}) == 1


def test_a_file_that_the_store_cannot_hold_is_told(monkeypatch):
    with pytest.raises(Exhausted, match=r"FILE=100 bytes: 1 of its 7 pieces were evicted .*raise dram_bytes"):
        put(monkeypatch, Reason.EVICTED)
