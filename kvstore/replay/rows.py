"""Rows of trace files, checked before a reader sees them: files come from strangers, and may be cut or of another
kind."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from kvstore.errors import BadRequest

PROMPT_TOKENS_MAX = 1 << 24
"""Of one prompt or answer: more is no request of any engine."""
TIME_MAX = 1 << 53
"""In the unit of the trace: up to here its JSON numbers are exact."""
RUN_BLOCKS_MAX = 1 << 19
"""That a few bytes of a file may stand for."""
READ_BYTES = 1 << 18


GZIP_WINDOW = 31
"""What zlib takes for: with a header of gzip."""
HEAD_MAX = 1 << 16
COLUMNS_SHOWN_MAX = 8
SHOWN_MAX = 40
"""Characters of a value that is refused."""


class Frames(Protocol):
    """As zstandard's ZstdDecompressionObj and zlib's decompressobj."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes) -> bytes: ...


class Decompressed(io.RawIOBase):
    """What zstd frames hold, or members of a gzip file. The libraries' own readers take a file that was cut off for its
    end. Reads raise ValueError for a frame that is cut off or broken."""

    def __init__(
        self, raw: IO[bytes], name: str, start: Callable[[], Frames], broken: type[Exception]
    ) -> None:
        self._raw = raw
        self._name = name
        self._start = start
        self._broken = broken
        self._frame: Frames | None = None
        self._rest = b""
        """Decompressed, and not read yet."""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._rest:
            left = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            data = left or self._raw.read(READ_BYTES)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise ValueError(f"is cut off within its {self._name} data")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._start()
            try:
                self._rest = self._frame.decompress(data)
            except self._broken as error:
                raise ValueError(f"is no {self._name} file: {error}") from None
        taken = min(len(into), len(self._rest))
        into[:taken] = self._rest[:taken]
        self._rest = self._rest[taken:]
        return taken


ZSTD_MAGIC, GZIP_MAGIC = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[IO[str]]:
    """The file as text, decompressed if it begins as zstd or gzip does, whatever its name. Raises BadRequest where
    it cannot be opened, for what is neither UTF-8 nor whole, also while it is read, and where `zstandard` is missing;
    OSError where a read fails."""
    try:
        with _open(path) as raw:
            begins = raw.peek(len(ZSTD_MAGIC))[: len(ZSTD_MAGIC)]  # a pipe cannot seek
            yield io.TextIOWrapper(_plain(raw, path, begins), "utf-8-sig", newline="")
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"is no text in UTF-8 ({error.reason})") from None
    except ValueError as error:
        raise _unreadable(path, str(error)) from None


def _plain(raw: IO[bytes], path: str | Path, begins: bytes) -> io.BufferedReader:
    if begins.startswith(GZIP_MAGIC):
        gzip = Decompressed(raw, "gzip", lambda: zlib.decompressobj(GZIP_WINDOW), zlib.error)
        return io.BufferedReader(gzip, READ_BYTES)
    if begins != ZSTD_MAGIC and not str(path).endswith(".zst"):
        assert isinstance(raw, io.BufferedReader)
        return raw
    try:
        import zstandard
    except ImportError:
        raise BadRequest(
            "is compressed with zstd",
            field="trace",
            value=str(path),
            remedy="pip install 'attnstore[simulate]', or decompress it first",
        ) from None
    decompressor = zstandard.ZstdDecompressor()
    zstd = Decompressed(raw, "zstd", lambda: decompressor.decompressobj(), zstandard.ZstdError)
    return io.BufferedReader(zstd, READ_BYTES)


def _open(path: str | Path) -> io.BufferedReader:
    try:
        return open(path, "rb")
    except OSError as problem:
        raise BadRequest(
            f"cannot be read: {problem.strerror}",
            field="trace",
            value=str(path),
            remedy="name a file that can be read",
        ) from None


def _unreadable(path: str | Path, why: str) -> BadRequest:
    remedy = "fetch it anew; text, plain or compressed with zstd or gzip, can be read"
    return BadRequest(why, field="trace", value=str(path), remedy=remedy)


FIELDS = {
    "recorded": ("kvstore_trace",),
    "mooncake": ("timestamp", "input_length", "hash_ids"),
    "agentic": ("requests",),
    "sharegpt": ("turns",),
    "azure": ("timestamp", "contexttokens", "generatedtokens"),
    "lmcache": ("timestamp", "session_id", "input"),
}
"""By format, what its first line names, in small letters."""


def format_of(line: str) -> str:
    """The format that a file's first line belongs to; "": none that is known."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if isinstance(row, dict):
        names = {name.casefold() for name in row}
        known = [name for name in FIELDS if name != "azure"]
    else:
        names = {name.strip().strip('"').casefold() for name in re.split("[,;\t]", line[:HEAD_MAX])}
        known = ["azure"]
    return next((name for name in known if names.issuperset(FIELDS[name])), "")


class Refused(ValueError):
    """Of a row, where the remedy is known."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


def malformed(
    path: str | Path, number: int, why: str | ValueError, line: str, *, of: str, good: int = 0
) -> BadRequest:
    """`line` is the text of line `number` in a file read as format `of`; `good` rows before it could be read."""
    found = "" if good else format_of(line)
    if isinstance(why, Refused):
        remedy = why.remedy
    elif found and found != of:
        remedy = f"--format {found}"
    elif good or found:
        remedy = "mend the line or leave it out"
    elif line.lstrip().startswith("["):
        remedy = "each line is to be an object: jq -c '.[]' FILE makes such lines of a JSON array"
    else:
        remedy = f"another --format than {of}? known: {', '.join(FIELDS)}"
    return BadRequest(str(why), field=f"trace, line {number}", value=str(path), remedy=remedy)


# --------------------------------------------------------------------------------------------------------------- fields

Kind = Callable[[Any], Any]
"""Gives the value as the reader wants it. Raises ValueError that says what it is not."""


def shown(value: Any) -> str:
    """As the file writes it, the beginning."""
    try:
        text = json.dumps(value) if not isinstance(value, str) else repr(value[:SHOWN_MAX])
    except RecursionError:  # it could just be read
        return "[..."
    return text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "..."


def tokens(value: Any) -> int:
    """Of a prompt or an answer."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= PROMPT_TOKENS_MAX:
        raise ValueError(f"is no count from 0 to {PROMPT_TOKENS_MAX:,}: {shown(value)}")
    return value


def counted(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= TIME_MAX:
        raise ValueError(f"is no count from 1 to {TIME_MAX}: {shown(value)}")
    return value


def time(value: Any) -> float:
    """Since some beginning, in any unit."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= TIME_MAX:
        raise ValueError(f"is no time from 0 to {TIME_MAX}: {shown(value)}")  # nor is nan
    return value


def number(value: Any) -> int:
    """That names something: 64 bits with their sign."""
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"is no whole number of 64 bits: {shown(value)}")
    return value


def numbers(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) > PROMPT_TOKENS_MAX:
        raise ValueError(f"is no list of at most {PROMPT_TOKENS_MAX:,}: {shown(value)}")
    return [number(each) for each in value]


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"is no text: {shown(value)}")
    return value


def named(value: Any) -> str | int:
    return value if isinstance(value, str) else number(value)


def pairs(value: Any) -> list[tuple[int, int]]:
    """[[tokens, tokens], ...]"""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        raise ValueError(f"is no list of pairs: {shown(value)}")
    return [(tokens(first), tokens(second)) for first, second in value]


def runs(value: Any) -> list[int]:
    """[[first, how many], ...] written out."""
    if not isinstance(value, list) or not all(isinstance(run, list) and len(run) == 2 for run in value):
        raise ValueError(f"is no list of runs: {shown(value)}")
    if sum(tokens(length) for _, length in value) > RUN_BLOCKS_MAX:
        raise ValueError(f"has more than {RUN_BLOCKS_MAX:,} blocks")
    return [number(first) + n for first, length in value for n in range(length)]


def checked(
    row: Any, kinds: Mapping[str, Kind], optional: Mapping[str, tuple[Kind, Any]] | None = None
) -> dict[str, Any]:
    """The row's fields of these kinds, those that are `optional` with a default. Raises ValueError."""
    missing = [name for name in kinds if not isinstance(row, dict) or name not in row]
    if missing:
        raise ValueError(f"has no {missing[0]}")
    found = {name: default for name, (_, default) in (optional or {}).items()}
    all_kinds = {**kinds, **{name: kind for name, (kind, _) in (optional or {}).items()}}
    for name, kind in all_kinds.items():
        if name in row:
            try:
                found[name] = kind(row[name])
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None
    return found


def lines(
    path: str | Path,
    kinds: Mapping[str, Kind],
    optional: Mapping[str, tuple[Kind, Any]] | None = None,
    *,
    of: str,
    if_has: tuple[str, ...] = (),
    check: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """Objects of a file of JSON lines, read as format `of`; `if_has`: of these alone that have one of these fields.
    `check` raises ValueError for a row that makes no sense as a whole. Raises BadRequest with the line's number."""
    good = 0
    with opened(path) as file:
        for at, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise malformed(path, at, f"is not JSON: {error}", line, of=of, good=good) from None
            except RecursionError:
                raise malformed(path, at, "is nested too deep", line, of=of, good=good) from None
            if if_has and isinstance(row, dict) and not any(name in row for name in if_has):
                if not good and format_of(line) not in ("", of):
                    raise malformed(path, at, f"has none of {', '.join(if_has)}", line, of=of)
                continue
            try:
                found = checked(row, kinds, optional)
                if check is not None:
                    check(found)
            except ValueError as error:
                raise malformed(path, at, error, line, of=of, good=good) from None
            good += 1
            yield found


def table(path: str | Path, kinds: Mapping[str, Kind], *, of: str) -> Iterator[dict[str, Any]]:
    """Rows of a CSV file with a head, as `lines`. Columns are known by their names, in capitals or not, and stand apart
    by commas, semicolons or tabs."""
    with opened(path) as file:
        head = file.readline(HEAD_MAX)
        apart = max(",;\t", key=head.count)
        there = [name.strip().strip('"') for name in head.strip().split(apart)]
        if not any(there):  # an empty file
            return
        small = [name.casefold() for name in there]
        missing = [name for name in kinds if name.casefold() not in small]
        if missing:
            columns = ", ".join(name[:20] or "(no name)" for name in there[:COLUMNS_SHOWN_MAX])
            raise malformed(path, 1, f"has no column {missing[0]}, but: {columns}", head, of=of)
        names = {name.casefold(): name for name in kinds}
        rows = csv.DictReader(
            file, fieldnames=[names.get(name, name) for name in small], delimiter=apart, strict=True
        )
        while True:
            try:
                row = next(rows)
                found = checked({name: value or "" for name, value in row.items() if name}, kinds)
            except StopIteration:
                return
            except UnicodeDecodeError:
                raise
            except (csv.Error, ValueError) as error:
                raise malformed(path, rows.line_num + 1, str(error), head, of=of, good=1) from None
            yield found


def written(kind: Kind) -> Kind:
    """Of a whole number in a CSV file."""

    def read(value: Any) -> Any:
        if not (value.isascii() and value.isdigit() and len(value) < 20):
            raise ValueError(f"is no whole number: {value[:40]!r}")
        return kind(int(value))

    return read


# -------------------------------------------------------------------------------------------------------------- options


def option(name: str, kind: str, value: Any) -> Any:
    """An option of a reader whose annotation is `kind` (int, float or bool). Raises BadRequest."""
    least = 1 if name == "chunk_tokens" else -1 if name == "namespace" else 0
    if kind == "bool":
        words = {"0": False, "false": False, "1": True, "true": True}
        if str(value).lower() in words:
            return words[str(value).lower()]
        wanted = "true or false"
    elif kind == "int":
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= PROMPT_TOKENS_MAX:
            return value
        wanted = f"a whole number from {least} to {PROMPT_TOKENS_MAX}"
    else:
        least_real, most = (0.0, 10.0) if name == "sigma" else (1e-6, 1e6)
        if isinstance(value, int | float) and not isinstance(value, bool) and least_real <= value <= most:
            return float(value)
        wanted = f"a number from {least_real:g} to {most:g}"
    raise BadRequest(f"must be {wanted}", field=f"--option {name}", value=value)
