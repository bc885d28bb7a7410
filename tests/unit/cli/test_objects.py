"""What doctor and put do when the daemon is not ready at once."""

from types import SimpleNamespace

import pytest

from kvstore.cli import objects
from kvstore.types import GrantResult

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
