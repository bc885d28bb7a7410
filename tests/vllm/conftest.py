"""Tests with a real vLLM engine. vLLM has an environment of its own (`make test-vllm`); elsewhere these are skipped.

An engine takes half a minute to start, so tests share them. What stands for a fresh process is an engine whose own
prefix cache was emptied ("forget"); one test uses a really fresh one.
"""

import contextlib
import functools
import importlib.util
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

BOUND_S = 300.0
"""Every wait ends by then; it is a failure, never a measurement."""
BLOCK = 32
ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Threads that meet at each of a tiny model's operations mostly wait for their turn on a busy machine; vLLM binds
    # those of several engines to the same core.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Process:
    """A child whose lines are read all the time."""

    def __init__(self, arguments: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-P", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd="/",
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                start_new_session=True,  # so that what it starts can be ended with it
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def line(self) -> str:
        line = self._lines.get(timeout=BOUND_S)
        assert line, f"it ended: {self.log.read_text()[-4000:]}"
        return line

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            return self.process.wait(BOUND_S)
        finally:
            self.process.kill()
            self.process.wait()


class Engine(Process):
    """`engine_process.py`."""

    def __init__(self, options: dict[str, Any], log: Path) -> None:
        super().__init__([str(Path(__file__).parent / "engine_process.py"), json.dumps(options)], log)
        assert json.loads(self.line()) == {"ready": True}

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        return dict(json.loads(self.line()))

    def ask(self, **request: Any) -> dict[str, Any]:
        self.send(**request)
        return self.receive()

    def generate(self, *tokens: list[int], **more: Any) -> list[dict[str, Any]]:
        """One after the other, so that batching changes nothing."""
        return [self.ask(generate=[{"tokens": each, **more}])["outputs"][0] for each in tokens]

    def forget(self) -> None:
        """What a restart of the engine would make it forget; what it has to save is saved first."""
        assert self.ask(flush=BOUND_S)["flushed"]
        assert self.ask(forget=True)["forgotten"]

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Meanwhile it goes on with its steps, for what others want of it."""
        self.send(serve=True)
        yield
        assert self.ask(stop=True) == {"served": True}

    def counts(self) -> dict[str, int]:
        """The connector's counters, both sides."""
        told = self.ask(flush=BOUND_S)
        return {**dict.fromkeys(NAMES, 0), **told["worker"], **told["scheduler"], "tracked": told["tracked"]}


NAMES = (
    *("lookups", "lookups_late", "hit_tokens", "blocks_loaded", "blocks_failed", "blocks_saved"),
    *("blocks_already", "blocks_dropped", "blocks_refused", "resets"),
)


class Daemon:
    """kvstored, which tests stop, kill and start again in the same directories."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.run_dir = folder / "run"
        self._settings = {
            "run_dir": self.run_dir,
            "dram_bytes": 32 << 20,
            "segment_bytes": 4 << 20,
            "staging_bytes": 8 << 20,
            "log_level": "debug",  # then the daemon checks its invariants before it ends
            **settings,
        }
        self._process: Process | None = None
        self.start()

    def start(self) -> None:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self._settings.items()]
        self._process = Process(["-m", "kvstore", *flags], self.folder / "kvstored.log")
        from kvstore.client import connect
        from kvstore.errors import Unavailable

        for _ in range(200):
            try:
                connect(str(self.run_dir), timeout_s=0.5).close()
                return
            except Unavailable:
                assert self._process.process.poll() is None, (self.folder / "kvstored.log").read_text()[
                    -2000:
                ]
                threading.Event().wait(0.05)
        raise AssertionError("the daemon does not answer")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.process.kill()
        self._process.process.wait(BOUND_S)
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self._process.signal(signal.SIGCONT)
            self._process.signal(signal.SIGTERM)
            status = self._process.process.wait(BOUND_S)
            self._process = None
            assert status == 0, (self.folder / "kvstored.log").read_text()[-2000:]


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """Short, because a socket's path is bounded."""
    path = Path(tempfile.mkdtemp(prefix="kvs-vllm-"))
    yield path
    shutil.rmtree(path)


def make_model(path: Path, seed: int = 0) -> Path:
    """A tiny Llama with weights large enough that every token of a prompt tells on the answer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return make_model(folder / "model")


@pytest.fixture(scope="session")
def words(folder: Path, model: Path) -> Path:
    """The model with a tokenizer, which the API wants."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = folder / "words"
    shutil.copytree(model, path, copy_function=shutil.copy2)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


STARTED: list[Engine] = []


@pytest.fixture(scope="session")
def launch_engine(folder: Path, model: Path) -> Iterator[Callable[..., Engine]]:
    """launch(name, run_dir or None, extra={}, **vllm_options) -> Engine"""

    def launch(
        name: str, run_dir: Path | None, extra: dict[str, Any] | None = None, **options: Any
    ) -> Engine:
        if run_dir is not None:
            options["kv_transfer_config"] = transfer_config(run_dir, **(extra or {}))
        engine = Engine(
            {
                "model": str(model),
                "dtype": "float32",
                "max_model_len": 1024,
                "max_num_seqs": 8,
                "block_size": BLOCK,
                **options,
            },
            folder / f"{name}.log",
        )
        STARTED.append(engine)
        return engine

    yield launch
    for engine in STARTED:
        if engine.process.poll() is None:
            engine.end()


@pytest.fixture(autouse=True)
def engines_end_with_their_test() -> Iterator[None]:
    """Those of a test that failed would take the processor from the tests after it."""
    before = len(STARTED)
    yield
    for engine in STARTED[before:]:
        if engine.process.poll() is None:
            os.killpg(engine.process.pid, signal.SIGKILL)


def transfer_config(run_dir: Path, **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.gpu_worker.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # Tests say what is a hit: it is loaded, however fast a tiny model computes it.
        "kv_connector_extra_config": {"run_dir": str(run_dir), "compute_or_load": False, **extra},
    }


@pytest.fixture(scope="session")
def control(launch_engine: Callable[..., Engine]) -> Engine:
    """The same engine without a connector. It forgets before each use, so that it computes everything."""
    return launch_engine("control", None)


@pytest.fixture(scope="session")
def same(control: Engine) -> Callable[..., None]:
    """same(prompts, outputs, **parameters): asserts that an engine without connector says the same, bit for bit.

    It is asked twice: computing all of the prompt, and with its blocks in its own prefix cache. The two differ in the
    last bits of log-probabilities, because a matrix product over 8 tokens rounds otherwise than one over 200; what was
    restored is the latter. When a load was cut short, neither is what happened: then tokens are equal, and
    log-probabilities but for rounding; nor need they be `exactly` the same when they come from an engine with another
    number of compute threads.
    """
    known: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}

    def check(
        prompts: list[list[int]], outputs: list[dict[str, Any]], exactly: bool = True, **more: Any
    ) -> None:
        for tokens, output in zip(prompts, outputs, strict=True):
            name = json.dumps([tokens, more], sort_keys=True)
            if name not in known:
                assert control.ask(forget=True)["forgotten"]
                cold, warm = control.generate(tokens, tokens, **more)
                assert (cold["cached"], warm["cached"]) == (0, whole_blocks(tokens))
                known[name] = cold, warm
            cold, warm = known[name]
            assert output["finish"] == "length"
            assert output["tokens"] == cold["tokens"] == warm["tokens"]
            if exactly and output["cached"] in (0, whole_blocks(tokens)):
                assert output["logprobs"] == (warm if output["cached"] else cold)["logprobs"]
            else:
                assert output["logprobs"] == pytest.approx(cold["logprobs"], abs=1e-4)

    return check


class Adapters:
    """Stands for vLLM's manager of a rank's adapters; what it loads is of no account."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.reading: Callable[[], None] = lambda: None
        """Happens while it reads the files."""

    def _load_adapter(self, request: Any) -> Any:
        self.reading()
        return request

    def add_adapter(self, request: Any) -> bool:
        if request.lora_int_id not in self.held or request.load_inplace:
            self.held[request.lora_int_id] = self._load_adapter(request).lora_path
        return True

    def list_adapters(self) -> set[int]:
        return set(self.held)


class Executor:
    """Stands for vLLM's executor: ranks with a model of one parameter each, and calls to all of them."""

    def __init__(self, config: Any, ranks: int = 1, *, hidden: bool = False) -> None:
        """`hidden`: the weights are packed somewhere, and an empty parameter is left."""
        import torch

        self.models = [torch.nn.Linear(4, 4, bias=False) for _ in range(ranks)]
        self.workers = []
        for rank, model in enumerate(self.models):
            runner = SimpleNamespace(get_model=lambda model=model: model, lora_manager=Adapters())
            worker = SimpleNamespace(rank=rank, vllm_config=config, model_runner=runner)
            worker.update_weights = functools.partial(self._fill, rank)
            worker.add_lora = runner.lora_manager.add_adapter
            for name in ("sleep", "wake_up", "reload_weights", "start_weight_update", "finish_weight_update"):
                setattr(worker, name, lambda **_: None)
            self.workers.append(worker)
            self._fill(rank, 0.0)
            if hidden:
                model.weight = torch.nn.Parameter(torch.empty(0))
                model.load_weights = lambda weights: {name for name, _ in weights}

    def _fill(self, rank: int, value: float) -> None:
        """As loaders do: no counter moves."""
        self.models[rank].weight.data.fill_(value)

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if callable(method):
            return [method(worker, *args) for worker in self.workers]
        return [getattr(worker, method)(*args, **(kwargs or {})) for worker in self.workers]


def prompt(seed: int, count: int) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(3, 512) for _ in range(count)]


def whole_blocks(tokens: list[int]) -> int:
    """Tokens that vLLM's own prefix cache spares it: full blocks, at least one token left to compute."""
    return (len(tokens) - 1) // BLOCK * BLOCK


def restorable(tokens: list[int]) -> int:
    """Tokens that the connector can load: full blocks; the last token's KV is computed again."""
    return min(len(tokens) // BLOCK * BLOCK, len(tokens) - 1)
