"""Whatever happens between the steps of an engine that several requests keep busy: they come late and are aborted in
mid-load, all are preempted, caches are reset under loads, weights are asleep for a while, the daemon is killed or
stands still. The answers are those that the engine gives to each alone when it finds nothing, nobody waits for ever,
and nothing stays pinned or waited for. With the connector, layer by layer, and with the tier; the paged cache is so
small that requests preempt one another."""

import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client import connect

from .conftest import BLOCK, Daemon, Engine, prompt
from .test_tier import tiering

OPTIONS: dict[str, Any] = {
    "num_gpu_blocks_override": 44,
    "max_num_batched_tokens": 120,
    "enable_chunked_prefill": True,
}
WAYS = ("connector", "layer by layer", "tier")
STORIES = [prompt(4000 + number, length) for number, length in enumerate((400, 330, 257))]
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 97, 128, 200, 257, 330, 400)
STEPS = 40
ANSWER_MAX = 12
pytestmark = pytest.mark.timeout(1200)  # an engine starts with the first of them


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    home = folder / "fates"
    home.mkdir()
    (home / "ssd").mkdir()
    # Less DRAM than the prompts take: some of what is loaded is on SSD.
    daemon = Daemon(
        home,
        dram_bytes=16 << 20,
        ssd_dir=home / "ssd",
        ssd_bytes=256 << 20,
        ssd_slab_bytes=16 << 20,
        durable_within_ms=300,
    )
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module", params=WAYS)
def way(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(way: str, daemon: Daemon, launch_engine: Callable[..., Engine]) -> Iterator[Engine]:
    patient = {"lookup_ms": 2000, "load_ms": 3000, "save_ms": 2000, "salt": way}
    name = "fates-" + way.replace(" ", "-")
    if way == "tier":
        config = tiering(daemon.run_dir, **patient)
        engine = launch_engine(name, None, kv_transfer_config=config, **OPTIONS)
    else:
        layerwise = {"layerwise": way != "connector"}
        engine = launch_engine(name, daemon.run_dir, {**patient, **layerwise}, **OPTIONS)
    yield engine
    assert engine.end() == 0


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Callable[[list[int], int], list[int]]:
    """alone(prompt, count) -> the answer of an engine that finds nothing: no other request has its salt."""
    known: dict[tuple[int, ...], list[int]] = {}

    def ask(tokens: list[int], count: int) -> list[int]:
        name = tuple(tokens)
        if name not in known:
            asked = {"tokens": tokens, "max_tokens": ANSWER_MAX, "salt": f"{len(known)}"}
            (output,) = engine.ask(generate=[asked])["outputs"]
            assert output["finish"] == "length" and not output["cached"]
            known[name] = output["tokens"]
        return known[name][:count]

    return ask


def drawn(
    seed: int, daemon: Daemon, way: str
) -> tuple[list[dict[str, Any]], dict[str, int], list[dict[str, Any]]]:
    """Requests, which of them are aborted when, and what happens."""
    chosen = random.Random(seed)
    requests: list[dict[str, Any]] = []
    for _ in range(8):
        tokens = chosen.choice(STORIES)[: chosen.choice(LENGTHS)]
        if chosen.random() < 0.5:
            tokens = tokens + prompt(4100 + chosen.randrange(3), chosen.randrange(1, 60))
        requests.append(
            {
                "tokens": tokens,
                "max_tokens": chosen.randrange(1, ANSWER_MAX),
                "at": chosen.randrange(STEPS // 2),
            }
        )
    aborts = {str(chosen.randrange(8)): chosen.randrange(STEPS) for _ in range(2)}
    assert daemon._process is not None
    pid = daemon._process.process.pid
    kinds: list[list[dict[str, Any]]] = [
        # vLLM's OffloadingConnector asserts that a request whose running is reset has nothing to load in the next step,
        # which is not so while its host memory has what it needs: with the tier that is reset, too.
        [{"do": "preempt", "connector": way == "tier"}],
        [{"do": "preempt", "connector": True}],
        [{"do": "reset"}],
        [{"do": "call", "rpc": "sleep", "kwargs": {"level": 1}}, {"do": "call", "rpc": "wake_up"}],
        [{"do": "signal", "pid": pid, "number": number} for number in (signal.SIGSTOP, signal.SIGCONT)],
        [{"do": "signal", "pid": pid, "number": signal.SIGKILL}],
    ]
    events: list[dict[str, Any]] = []
    for kind in chosen.sample(kinds, 2):
        places = sorted(chosen.randrange(STEPS) for _ in kind)
        events += [{**event, "at": at} for event, at in zip(kind, places, strict=True)]
    # A process that was killed takes no other signal.
    killed = min((event["at"] for event in events if event.get("number") == signal.SIGKILL), default=STEPS)
    signals = [event for event in events if event["do"] == "signal"]
    events = [event for event in events if event not in signals or event["at"] <= killed]
    return requests, aborts, sorted(events, key=lambda event: event.get("number") == signal.SIGKILL)


def pinned(daemon: Daemon) -> int:
    with connect(str(daemon.run_dir), timeout_s=30.0) as client:
        return sum(namespace.pinned_bytes for namespace in client.stats(timeout_s=30.0).namespaces)


def until(what: Callable[[], bool]) -> None:
    for _ in range(600):
        if what():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it did not come")


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens(
    engine: Engine, daemon: Daemon, alone: Callable[[list[int], int], list[int]], way: str, seed: int
) -> None:
    requests, aborts, events = drawn(seed, daemon, way)
    expected = [alone(request["tokens"], request["max_tokens"]) for request in requests]
    engine.forget()
    try:
        # The first time it computes and saves most of it, then it finds what is left of that.
        for _ in range(2):
            outputs = engine.ask(generate=requests, abort=aborts, events=events)["outputs"]
            for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
                if output["finish"] == "abort":
                    assert str(number) in aborts, (number, events)
                else:
                    assert output["tokens"] == wanted, (number, aborts, events)
            assert engine.counts()["tracked"] == 0
            mend(engine, daemon)
            events = [event for event in events if event["do"] != "signal"]
            engine.forget()
        until(lambda: pinned(daemon) == 0)
        assert engine.counts().get("bugs", 0) == 0
    finally:
        mend(engine, daemon)


def mend(engine: Engine, daemon: Daemon) -> None:
    """The daemon is there and awake, and so are the weights."""
    assert daemon._process is not None
    process = daemon._process.process
    process.send_signal(signal.SIGCONT)
    try:
        status = process.wait(0.2)
    except Exception:
        status = None
    if status is not None:
        daemon._process = None
        daemon.start()
    assert engine.ask(rpc="wake_up")["called"]
