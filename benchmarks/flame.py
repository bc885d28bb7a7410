"""Where the time of a get and of a put goes, as a picture: flame graphs of the client and of the daemon.

A thread in each of the two processes looks a thousand times a second where the others are. The client's is time by the
clock: a frame that waits for the daemon is as wide as the wait. The daemon's is the same, but without the moments in
which a thread of it waits for work. Copies and checksums are made without the interpreter's lock, so they show as the
Python function that calls them.

    make bench-flame ARGS='--value-bytes 262144 --svg docs/profile-256K.svg'
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

SAMPLE_S = 0.001
SWITCH_S = 0.0001
"""How soon the sampler gets the interpreter's lock."""
IDLE = {
    "wait",
    "select",
    "get",
    "run",
    "_run",
    "_worker",
    "_run_segment_work",
    "_close_descriptors",
    "listen",
}
"""A daemon's thread whose innermost function is one of these waits for work."""
BELOW = ("flame.main", "runners.run", "threading.run")
"""What calls one of these is the same for all."""
DEPTH_MAX = 40
WIDTH, ROW, LEFT = 1200, 17, 8

Stacks = Counter[tuple[str, ...]]


class Sampler:
    """Counts stacks of all threads but its own, under the name of the present phase; "" counts nothing."""

    def __init__(self, *, only: int | None = None) -> None:
        self.phase = ""
        self.stacks: dict[str, Stacks] = {}
        self._only = only
        self._thread = threading.Thread(target=self._run, daemon=True)
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()

    def _run(self) -> None:
        mine = threading.get_ident()
        while True:
            time.sleep(SAMPLE_S)
            if phase := self.phase:
                counts = self.stacks.setdefault(phase, Counter())
                for number, frame in sys._current_frames().items():
                    if number != mine and self._only in (None, number):
                        counts[stack_of(frame)] += 1


def stack_of(frame: Any) -> tuple[str, ...]:
    names = []
    while frame is not None and len(names) < DEPTH_MAX:
        code = frame.f_code
        names.append(f"{Path(code.co_filename).stem}.{code.co_name}")
        frame = frame.f_back
    cut = min((names.index(name) for name in BELOW if name in names), default=len(names))
    return tuple(reversed(names[:cut] or names[:1]))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--value-bytes", type=int, default=2 << 20)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--seconds", type=float, default=4.0, help="of each of get and put")
    options.add_argument("--svg", default="docs/profile.svg")
    options.add_argument("--daemon", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.daemon is not None:
        return daemon(chosen.daemon)
    panels: list[tuple[str, Stacks]] = []
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder, profiled(folder) as (process, address):
        client, plan = warmed(address, chosen.value_bytes, chosen.batch)
        sampler = Sampler(only=threading.main_thread().ident)
        numbers = iter(range(1 << 20, 1 << 40))
        calls = {}
        for action in ("get", "put"):
            fresh = (
                (client.plan([next(numbers) for _ in range(chosen.batch)]) for _ in numbers)
                if action == "put"
                else iter(lambda: plan, None)
            )
            say(process, action)
            calls[action] = 0
            deadline = time.monotonic() + chosen.seconds
            while time.monotonic() < deadline:
                ready = next(fresh)
                sampler.phase = action
                getattr(client, action)(ready)
                sampler.phase = ""
                calls[action] += 1
            say(process, "")
        client.close()
        theirs = json.loads(say(process, "end"))
    for action in ("get", "put"):
        per_call = f"{chosen.batch} x {chosen.value_bytes >> 10} KiB"
        samples = sum(sampler.stacks[action].values())
        panels.append(
            (
                f"{action} of {per_call}: the client, {calls[action]} calls, {samples} samples",
                sampler.stacks[action],
            )
        )
        working = Counter({tuple(stack): count for stack, count in theirs.get(action, []) if not idle(stack)})
        panels.append((f"{action}: the daemon's threads at work, {sum(working.values())} samples", working))
    Path(chosen.svg).write_text(svg(panels))
    print(f"written: {chosen.svg}")
    return 0


def warmed(address: dict[str, Any], value_bytes: int, batch: int) -> tuple[Any, Any]:
    """A client that has put as much as there is room for, and the plan of a get."""
    from peers import Shape, attnstore

    shape = Shape(value_bytes, batch * value_bytes, 512 << 20, 96 << 20, batch, "flame")
    client = attnstore.Client(address, shape)
    for start in range(0, shape.room_bytes // value_bytes, batch):
        client.put(client.plan(range(1 << 30 | start, (1 << 30 | start) + batch)))
    plan = client.plan(range(batch))
    client.put(plan)
    client.get(plan)
    client.check(plan)
    return client, plan


@contextlib.contextmanager
def profiled(folder: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A daemon that samples itself."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-P", __file__, "--daemon", f"--run-dir={folder}/run", "--log-level=warning"),
            *("--dram-bytes=640M", "--segment-bytes=64M"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, {"run_dir": f"{folder}/run"}
    finally:
        process.terminate()
        process.communicate()


def say(process: subprocess.Popen[str], phase: str) -> str:
    assert process.stdin and process.stdout
    process.stdin.write(phase + "\n")
    process.stdin.flush()
    return process.stdout.readline()


def daemon(arguments: list[str]) -> int:
    """Runs kvstored; a line on the standard input names the phase, "end" gives all stacks back."""
    sampler = Sampler()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the daemon says there is no answer

    def listen() -> None:
        for line in sys.stdin:
            sampler.phase = line.strip() if line.strip() != "end" else ""
            told = [] if line.strip() != "end" else sampler.stacks
            print(
                json.dumps({p: list(c.items()) for p, c in told.items()} if told else {}),
                file=answers,
                flush=True,
            )

    threading.Thread(target=listen, daemon=True).start()
    sys.argv = ["kvstored", *arguments]
    runpy.run_module("kvstore", run_name="__main__")
    return 0


def idle(stack: list[str]) -> bool:
    return stack[-1].rpartition(".")[2] in IDLE


def svg(panels: list[tuple[str, Stacks]]) -> str:
    parts: list[str] = []
    y = 0
    for title, stacks in panels:
        y += 2 * ROW
        parts.append(f'<text x="{LEFT}" y="{y - 5}" font-weight="bold">{html.escape(title)}</text>')
        boxes, depth = laid_out(stacks)
        parts += [box(*of, top=y) for of in boxes]
        y += (depth + 1) * ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * LEFT}" height="{y}"'
    return (
        f'{head} font-family="monospace" font-size="11">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def laid_out(stacks: Mapping[tuple[str, ...], int]) -> tuple[list[tuple[str, float, float, int]], int]:
    """(name, left and width as shares of the whole, depth) of every frame; callers above what they call."""
    total = sum(stacks.values()) or 1
    boxes: list[tuple[str, float, float, int]] = []

    def lay(rows: list[tuple[tuple[str, ...], int]], left: float, depth: int) -> int:
        deepest = depth
        for name in dict.fromkeys(stack[depth] for stack, _ in rows if len(stack) > depth):
            below = [(stack, count) for stack, count in rows if len(stack) > depth and stack[depth] == name]
            width = sum(count for _, count in below) / total
            boxes.append((name, left, width, depth))
            deepest = max(deepest, lay(below, left, depth + 1))
            left += width
        return deepest

    return boxes, lay(sorted(stacks.items()), 0.0, 0)


def box(name: str, left: float, width: float, depth: int, *, top: int) -> str:
    x, wide = LEFT + left * WIDTH, width * WIDTH
    if wide < 1:
        return ""
    hue = zlib.crc32(name.partition(".")[0].encode()) % 360
    label = html.escape(name[: int(wide / 6.7)] if wide > 30 else "")
    y = top + depth * ROW
    return (
        f'<g><title>{html.escape(name)}: {width:.1%}</title><rect x="{x:.1f}" y="{y}" width="{wide:.1f}" '
        f'height="{ROW - 1}" fill="hsl({hue},60%,78%)"/><text x="{x + 3:.1f}" y="{y + 12}">{label}</text></g>'
    )


if __name__ == "__main__":
    sys.exit(main())
