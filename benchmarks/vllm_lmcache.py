"""One vLLM engine with kvstored, the same with LMCache's multiprocess server, the same without a store: the same
prompts in the same run, each for a first time and again. The engines' own prefix caches are off, so that whatever
is restored comes from the store.

Lengths are 8 tokens more than multiples of 256, so that all but those can be restored with any chunk size. What the
engine takes for 8 tokens alone, no store can spare it. Between two requests there is a pause in which what is to be
saved is saved. The arms take turns within each round, in an order that rotates; figures are medians. CPU seconds are
those of the engine's and the store's processes, for one request and the pause behind it. Answers must be the same
tokens in all arms. What connectors do on the threads of the scheduler and of the rank is timed call by call, and summed
up by request.

With `--part ssd` each store's memory is small and its disk reads 200 MB/s. Before prompts are asked again,
others push them out to it. The model is random, and about as fast to compute as to load: what matters is that nobody is
slower than without a store.

    make bench-lmcache ARGS='--quick --json'
    make bench-lmcache ARGS='--lengths 4104 --rounds 3'
    make bench-lmcache ARGS='--part ssd'
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Goal, arguments, finish, heading, some

ROOT = Path(__file__).parent.parent
MODELS = ROOT / ".cache" / "models"
ARMS = ("no store", "kvstored", "lmcache")
LENGTHS = (8, 264, 1032, 2056, 4104)
QUICK = (8, 264, 1032)
FILLERS = (2056, 2056, 2056)
"""Prompts that push the others out of memory."""
SSD_BYTES_PER_S = 200_000_000
SSD_STORE_BYTES = 96 << 20
TIMED = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished", "request_finished_all_groups", "take_events"),
    *("get_kv_connector_stats", "has_pending_push_work", "has_pending_block_frees"),
)
"""What vLLM calls of a connector on its scheduler's thread."""
TIMED_IN_RANKS = (
    *(
        "handle_preemptions",
        "bind_connector_metadata",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
    ),
    *("wait_for_save", "finish_forward", "get_transfer_results", "get_finished"),
    *("get_block_ids_with_load_errors", "get_kv_connector_stats", "build_connector_worker_meta"),
    "clear_connector_metadata",
)
"""And in a rank, within or between its steps: what is copied to be saved, too."""
ANSWER_TOKENS = 8
BLOCK = 32
PAUSE_S = 0.5
BOUND_S = 900.0
ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",
    # Compute threads that spin while they wait for one another would fight the threads that load and save for the
    # cores, and make most of the CPU seconds of a busy machine.
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "ERROR",
}


class Engine:
    """One engine in a process of its own, and the store beside it, if any."""

    def __init__(
        self, arm: str, model: Path, folder: Path, store: subprocess.Popen[bytes] | None, connector: str
    ):
        self.arm = arm
        self._store = store
        self._errors = (folder / f"{arm}.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-P", sys.argv[0], "--engine", connector, "--model", str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        # An engine that hangs would hang the benchmark: it is killed, and that ends its lines.
        self._watch = threading.Timer(BOUND_S, self._process.kill)
        self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        self._watch.cancel()
        self._watch = threading.Timer(BOUND_S, self._process.kill)
        self._watch.start()
        line = self._process.stdout.readline()
        self._watch.cancel()
        if not line:
            sys.exit(f"the engine with {self.arm} ended: {Path(self._errors.name).read_text()[-2000:]}")
        return dict(json.loads(line))

    def ask(self, tokens: Sequence[int]) -> dict[str, Any]:
        return self.send(tokens=list(tokens))

    def send(self, **request: Any) -> dict[str, Any]:
        """`tokens`; `count` of the answer; `handed`: what a router hands on from another engine."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._receive()

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid) + (cpu_seconds(self._store.pid) if self._store else 0.0)

    def end(self) -> None:
        end(self._process)
        self._errors.close()


def end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(20)


def cpu_seconds(pid: int) -> float:
    """Of a process and its living descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    spent = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        spent += sum(cpu_seconds(int(child)) for child in children.read_text().split())
    return spent


def serve(model: str, connector: str) -> None:
    """An engine that answers lines of tokens, and forgets after each: it has no prefix cache of its own."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=4352,
        max_num_seqs=4,
        max_num_batched_tokens=2560,
        block_size=BLOCK,
        enable_prefix_caching=False,
        num_gpu_blocks_override=2 * 4352 // BLOCK,
        disable_log_stats=False,
        disable_hybrid_kv_cache_manager=True,
        kv_transfer_config=json.loads(connector) or None,
    )

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    clock = Clock(llm.llm_engine.engine_core.engine_core.scheduler.connector, TIMED)
    in_rank = Clock(get_kv_transfer_group() if has_kv_transfer_group() else None, TIMED_IN_RANKS)

    def generate(tokens: list[int], count: int, handed: dict[str, Any] | None = None) -> Any:
        parameters = SamplingParams(
            max_tokens=count,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": handed} if handed else None,
        )
        (output,) = llm.generate([{"prompt_token_ids": tokens}], parameters, use_tqdm=False)
        return output

    say({})
    for line in sys.stdin:
        asked = json.loads(line)
        clock.take()
        in_rank.take()
        output = generate(asked["tokens"], asked.get("count", ANSWER_TOKENS), asked.get("handed"))
        cpu_us, wall_us = clock.take()
        rank_cpu_us, rank_wall_us = in_rank.take()
        time.sleep(asked.get("pause_s", PAUSE_S))
        generate([5, 6, 7], 1)  # connectors report with a step, and may hold blocks until then
        say(
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "ttft_ms": 1e3 * output.metrics.first_token_latency,
                "cpu_us": cpu_us,
                "wall_us": wall_us,
                "rank_cpu_us": rank_cpu_us,
                "rank_wall_us": rank_wall_us,
                "handed": output.kv_transfer_params,
            }
        )


class Clock:
    """What a connector's calls take of the thread that makes them: of the CPU, and in all."""

    def __init__(self, connector: Any, names: Sequence[str]) -> None:
        self._spent = [0, 0]
        self._inside = False
        for name in names if connector is not None else ():
            setattr(connector, name, self._timed(getattr(connector, name)))

    def _timed(self, call: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            if self._inside:  # one of them calls another
                return call(*arguments, **named)
            self._inside = True
            began = time.thread_time_ns(), time.perf_counter_ns()
            try:
                return call(*arguments, **named)
            finally:
                self._inside = False
                self._spent[0] += time.thread_time_ns() - began[0]
                self._spent[1] += time.perf_counter_ns() - began[1]

        return timed

    def take(self) -> tuple[float, float]:
        """Microseconds since it was taken last."""
        cpu, wall = self._spent
        self._spent = [0, 0]
        return cpu / 1e3, wall / 1e3


def start_kvstored(
    folder: Path, store_bytes: int, stores: list[subprocess.Popen[bytes]], *, ssd: bool = False
) -> dict[str, Any]:
    """Adds the process to `stores`; returns what vLLM is told."""
    run_dir = folder / "run"
    command = [f"--run-dir={run_dir}", f"--dram-bytes={store_bytes}"]
    environment = dict(os.environ)
    if ssd:
        (folder / "kvstored-ssd").mkdir()
        command += [f"--ssd-dir={folder / 'kvstored-ssd'}", "--ssd-bytes=4G", "--segment-bytes=16M"]
        environment["ATTNSTORE_TEST_READ_BYTES_PER_S"] = str(SSD_BYTES_PER_S)
    else:
        command += ["--segment-bytes=128M"]
    module = "kvstore.sim.daemon" if ssd else "kvstore"
    with (folder / "kvstored.log").open("wb") as log:
        stores.append(
            subprocess.Popen([sys.executable, "-P", "-m", module, *command], stderr=log, env=environment)
        )
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.gpu_worker.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"run_dir": str(run_dir)},
    }


def start_lmcache(
    folder: Path,
    store_bytes: int,
    chunk_tokens: int,
    stores: list[subprocess.Popen[bytes]],
    *,
    ssd: bool = False,
) -> dict[str, Any]:
    """The same. On a CPU its engines copy from and to its shared memory, as ours do."""
    port, http, metrics = free_ports(3)
    command = [
        *(
            str(Path(sys.executable).parent / "lmcache"),
            "server",
            "--transport",
            "zmq",
            "--host",
            "localhost",
        ),
        *("--port", str(port), "--http-port", str(http), "--prometheus-port", str(metrics)),
        *("--l1-size-gb", str(store_bytes / (1 << 30)), "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto", "--shm-name", f"kvs-bench-{os.getpid()}"),
        *("--chunk-size", str(chunk_tokens), "--max-workers", "2"),
    ]
    environment = {**os.environ, **ENVIRONMENT}
    if ssd:
        (folder / "lmcache-ssd").mkdir()
        adapter = {
            "type": "plugin",
            "module_path": "slow_files",
            "class_name": "SlowFiles",
            "config_class_name": "FSL2AdapterConfig",
            "adapter_params": {"base_path": str(folder / "lmcache-ssd")},
        }
        command += ["--l2-adapter", json.dumps(adapter)]
        environment |= {
            "PYTHONPATH": str(ROOT / "benchmarks" / "plugins"),
            "SLOW_FILES_BYTES_PER_S": str(SSD_BYTES_PER_S),
        }
    with (folder / "lmcache.log").open("wb") as log:
        store = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        stores.append(store)
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        if store.poll() is not None:
            sys.exit(f"the LMCache server ended: {(folder / 'lmcache.log').read_text()[-2000:]}")
        time.sleep(0.1)
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost",
            "lmcache.mp.port": port,
            "lmcache.mp.transfer_mode": "engine_driven",
        },
    }


def random_model() -> Path:
    """Its folder; made if it is not there yet."""
    sys.path.insert(0, str(ROOT / "examples"))
    from models import prepare_wide

    return prepare_wide(MODELS, small=True).folder


def free_ports(count: int) -> list[int]:
    listeners = [socket.socket() for _ in range(count)]
    for listener in listeners:
        listener.bind(("127.0.0.1", 0))
    ports = [int(listener.getsockname()[1]) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def measure(
    engines: list[Engine],
    rounds: int,
    lengths: Sequence[int],
    vocabulary: int,
    fillers: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """One row per round, arm and phase. `fillers`: lengths of prompts that are asked between the phases."""
    rows = []
    for engine in engines:
        for number in range(2):  # what is done once only
            engine.ask([number + 1, *(100 + n % (vocabulary - 100) for n in range(600))])
    for number in range(rounds):
        chosen = random.Random(number)

        def made(length: int, chosen: random.Random = chosen) -> list[int]:
            return [chosen.randrange(100, vocabulary) for _ in range(length)]

        prompts = list(map(made, lengths))
        pushing = list(map(made, fillers))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        turn = number % len(engines)
        for engine in engines[turn:] + engines[:turn]:
            for phase in ("first", "again"):
                if phase == "again":
                    for prompt in pushing:
                        engine.ask(prompt)
                answers, cpu_s = [], []
                for prompt in prompts:
                    began = engine.cpu_seconds()
                    answers.append(engine.ask(prompt))
                    cpu_s.append(engine.cpu_seconds() - began)
                rows.append(
                    {
                        "round": number,
                        "arm": engine.arm,
                        "phase": phase,
                        "cpu_s": cpu_s,
                        "ttft_ms": [answer["ttft_ms"] for answer in answers],
                        "cached": [answer["cached"] for answer in answers],
                        "tokens": [answer["tokens"] for answer in answers],
                        "cpu_us": [answer["cpu_us"] for answer in answers],
                        "wall_us": [answer["wall_us"] for answer in answers],
                        "rank_cpu_us": [answer["rank_cpu_us"] for answer in answers],
                        "rank_wall_us": [answer["rank_wall_us"] for answer in answers],
                    }
                )
    return rows


def summed_up(rows: list[dict[str, Any]], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """What is compared: one row per figure, with a column per arm."""
    table = []
    for phase in ("first", "again"):
        of = {arm: [row for row in rows if (row["arm"], row["phase"]) == (arm, phase)] for arm in ARMS}
        for place, length in enumerate(lengths):
            table.append(
                {"what": f"TTFT of {length} tokens, {phase}", "unit": "ms", "better": "<="}
                | {arm: statistics.median(row["ttft_ms"][place] for row in of[arm]) for arm in ARMS}
            )
            table.append(
                {"what": f"CPU seconds of {length} tokens, {phase}", "unit": "s", "better": "<="}
                | {arm: statistics.median(row["cpu_s"][place] for row in of[arm]) for arm in ARMS}
            )
            if phase == "again" and length >= BLOCK:
                table.append(
                    {"what": f"of {length} prompt tokens restored", "unit": "%", "better": ">="}
                    | {
                        arm: statistics.median(100 * row["cached"][place] / length for row in of[arm])
                        for arm in ARMS
                    }
                )
    of_lengths = ", ".join(map(str, lengths))
    for what, field in (
        ("scheduler's thread of the CPU", "cpu_us"),
        ("scheduler's thread in all", "wall_us"),
        ("rank's thread of the CPU", "rank_cpu_us"),
        ("rank's thread in all", "rank_wall_us"),
    ):
        table.append(
            {
                "what": f"on the {what}, p99 of requests of {of_lengths} tokens",
                "unit": "us",
                "better": "<=",
            }
            | {
                arm: sorted(us for row in rows if row["arm"] == arm for us in row[field])[
                    -1 - len(rows) * len(lengths) // len(ARMS) // 100
                ]
                for arm in ARMS
            }
        )
    return table


def goals_of(table: list[dict[str, Any]], *, ssd: bool) -> list[Goal]:
    """Against LMCache; with a slow disk, against no store (LMCache's is in the table, beside ours). There is none of
    what is too short to be restored."""
    goals = []
    for line in table:
        if any(f" of {length} tokens," in line["what"] for length in range(BLOCK)):
            continue
        if ssd and line["what"].startswith("TTFT"):
            over = line["kvstored over no store"]
            goals.append(Goal(f"{line['what']}, kvstored over no store", over, "ratio", 1.05, "<="))
        elif not ssd and line["unit"] != "us" and line["ratio"] is not None:
            goal = 1.0 if line["unit"] == "%" else 0.85
            goals.append(Goal(f"{line['what']}, ours/theirs", line["ratio"], "ratio", goal, line["better"]))
    return goals


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument(
        "--model", type=Path, help="Hugging Face folder (default: the one that `make demo` made)"
    )
    parser.add_argument("--rounds", type=some, help="default: 6, a multiple of the arms")
    parser.add_argument("--lmcache-chunk", type=some, default=256, help="tokens; 256 is LMCache's default")
    parser.add_argument("--store-bytes", type=some, help="memory of each store")
    parser.add_argument(
        "--lengths", help="of the prompts, in tokens, with commas between (default: 8,264,1032,2056,4104)"
    )
    parser.add_argument("--part", choices=("dram", "ssd"), default="dram")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine is not None:
        serve(str(options.model), options.engine)
        return 0
    ssd = options.part == "ssd"
    model = options.model or (random_model() if ssd else next(MODELS.glob("smollm2-*"), None))
    if model is None:
        parser.error("no model: give one with --model, or run `make demo` once")
    lengths: Sequence[int] = QUICK if options.quick else LENGTHS
    if options.lengths:
        lengths = tuple(int(length) for length in options.lengths.split(","))
    store_bytes = options.store_bytes or (SSD_STORE_BYTES if ssd else 1 << 30)
    rounds = options.rounds or (3 if options.quick else 6)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    engines: list[Engine] = []
    stores: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="kvs-") as name:
        folder = Path(name)
        try:
            ours = start_kvstored(folder, store_bytes, stores, ssd=ssd)
            theirs = start_lmcache(folder, store_bytes, options.lmcache_chunk, stores, ssd=ssd)
            for arm, store, connector in zip(ARMS, (None, *stores), ({}, ours, theirs), strict=True):
                engines.append(Engine(arm, model, folder, store, json.dumps(connector)))
            rows = measure(engines, rounds, lengths, vocabulary, FILLERS if ssd else ())
        finally:
            for engine in engines:
                engine.end()
            for store in stores:
                end(store)
    answers = {arm: [row["tokens"] for row in rows if row["arm"] == arm] for arm in ARMS}
    same = all(answers[arm] == answers["no store"] for arm in ARMS)
    print(heading(__file__))
    print(
        f"vLLM {metadata.version('vllm-cpu')}, LMCache {metadata.version('lmcache')} with chunks of "
        f"{options.lmcache_chunk} tokens, {model.name}, fp32, {rounds} rounds; "
        f"answers {'are the same' if same else 'DIFFER'}\n"
    )
    table = summed_up(rows, lengths)
    print(f"{'medians':60} {'no store':>10} {'kvstored':>10} {'lmcache':>10} {'ours/theirs':>12}")
    for line in table:
        line["ratio"] = line["kvstored"] / line["lmcache"] if line["lmcache"] else None
        for arm in ARMS[1:]:
            line[f"{arm} over no store"] = line[arm] / line["no store"] if line["no store"] else None
        columns = " ".join(f"{line[arm]:>10.2f}" for arm in ARMS)
        shown = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
        print(f"{line['what'] + ', ' + line['unit']:60} {columns} {shown:>12}")
    table = [{"part": options.part} | line for line in table]
    finish(__file__, options, table, goals_of(table, ssd=ssd), key=("part", "what", "unit"))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
