"""Errors: what they say, and the one table of their codes."""

from __future__ import annotations

import grpc
import pytest

from kvstore import errors
from kvstore.errors import BY_CODE, BadRequest, Code, ConfigError, NotFound, StoreError, shorten


def test_an_error_names_field_value_and_remedy() -> None:
    error = BadRequest("must be above 0", field="ttl_ms", value=-1, remedy="leave it out")
    assert str(error) == "ttl_ms=-1: must be above 0 (leave it out)"
    assert (error.message, error.field, error.value, error.remedy) == (
        "must be above 0",
        "ttl_ms",
        "-1",
        "leave it out",
    )
    assert str(NotFound("no such session")) == "no such session"
    assert str(BadRequest("is missing", field="NODE")) == "NODE: is missing", (
        "of no value there is nothing to show"
    )


def test_codes_are_those_of_grpc() -> None:
    for code in Code:
        assert grpc.StatusCode[code.name].value[0] == code.value


def test_every_expected_failure_has_a_code_of_its_own() -> None:
    kinds = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StoreError)
    }
    assert set(BY_CODE.values()) == kinds - {StoreError, ConfigError}
    for code, kind in BY_CODE.items():
        assert kind.code.value == code
    assert len({kind.code for kind in BY_CODE.values()}) == len(BY_CODE)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"\x00\xff", "00ff"),
        (bytearray(b"ab"), "6162"),
        (12, "12"),
        ("x" * 80, "x" * 80),
        ("x" * 81, "x" * 80 + "… (81 characters)"),
        ("é\ud800", "\\xe9\\ud800"),
        (b"\0" * 1_000, "0" * 80 + "… (2000 characters)"),
    ],
)
def test_values_are_shown_short_and_in_ascii(value: object, text: str) -> None:
    assert shorten(value) == text
