"""A real vLLM engine in a process of its own, driven by JSON lines on standard input, one answer a line.

    {"generate": [{"tokens": [...], "max_tokens": 8, "salt": "..."}, ...], "abort": {"1": 3}}  -> {"outputs": [...]}
        all at once; request number 1 is aborted after 3 steps of the engine; "parameters": more of SamplingParams;
        "kv_hints": actions for the offloading; "handed": what a router hands on from another engine, which is in each
        output too; "embed": true: the prompt's embedding is wanted, of a pooling model; "at": the step in which it
        comes; "events": [{"at": 3, "do": "reset"}, {"at": 5, "do": "signal", "pid": 17, "number": 9}, ...]: between
        steps, what `happen` knows
    {"reset": true}     new weights epoch           -> {"reset": true or false}
    {"flush": 5.0}      until all is saved          -> {"flushed": ..., "worker": {...}, "scheduler": {...}}
    {"forget": true}    what a restart would make it forget
    {"serve": true}     steps of the engine until the next line comes, which is no request     -> {"served": true}
    {"metrics": true}                               -> {"name": value}: vLLM's own counters
    {"drop_group": 1}   the store forgets all that the engine has used of this group      -> {"dropped": chunks}
    {"rpc": "reload_weights", "kwargs": {...}}      a call to all ranks      -> {"called": true}
    {"lora": {"name": ..., "id": ..., "path": ..., "inplace": true}}   load an adapter   -> {"loaded": ...}
    {"scale": 1.5, "counted": true}                 all embeddings, in place, by no call of vLLM's; does a counter move?
    {"verify": true}                                the time has come to look at all weights -> {"verified": true}

The first line it writes is {"ready": true}; it ends with its input.
"""

import json
import os
import select
import sys
import time
from typing import Any

ASKED: set[bytes] = set()


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer

    import torch
    from vllm import LLM

    llm = LLM(
        **{
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "disable_log_stats": False,
            "seed": 0,
            **options,
        }
    )

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    if (offloading := offloading_of(llm)) is not None:
        note_keys(tier_of(offloading))
    say({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        if "generate" in request:
            aborts, events = request.get("abort", {}), request.get("events", [])
            say({"outputs": generate(llm, request["generate"], aborts, events)})
        elif "reset" in request:
            say({"reset": llm.reset_prefix_cache(reset_connector=True)})
        elif "forget" in request:
            say({"forgotten": llm.reset_prefix_cache()})
            if (offloading := offloading_of(llm)) is not None:
                offloading.primary_tier.reset_cache()
        elif "serve" in request:
            while not select.select([sys.stdin], [], [], 0.001)[0]:
                llm.llm_engine.step()
            sys.stdin.readline()
            say({"served": True})
        elif "flush" in request:
            say(flush(llm, request["flush"]))
        elif "drop_group" in request:
            say({"dropped": drop_group(llm, request["drop_group"])})
        elif "rpc" in request:
            llm.collective_rpc(request["rpc"], kwargs=request.get("kwargs"))
            say({"called": True})
        elif "lora" in request:
            say({"loaded": llm.llm_engine.add_lora(adapter(request["lora"]))})
        elif "scale" in request:
            weight = runner_of(llm).get_model().model.embed_tokens.weight
            with torch.no_grad():
                (weight if request["counted"] else weight.data).mul_(request["scale"])
            say({"scaled": True})
        elif "verify" in request:
            runner_of(llm)._attnstore_held._full_at = 0.0
            say({"verified": True})
        elif "metrics" in request:
            say({metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")})
    llm.llm_engine.engine_core.shutdown()


def happen(llm: Any, event: dict[str, Any]) -> None:
    """Between two steps of the engine."""
    if event["do"] == "signal":
        os.kill(event["pid"], event["number"])
    elif event["do"] == "reset":
        llm.reset_prefix_cache(
            reset_connector=True
        )  # in vain while requests hold blocks, but for the connector
    elif event["do"] == "preempt":
        try:
            llm.reset_prefix_cache(reset_running_requests=True, reset_connector=event.get("connector", False))
        except RuntimeError as error:
            # All are preempted; requests that wait for a load keep their blocks.
            if "remote KV transfer" not in str(error):
                raise
    elif event["do"] == "call":
        llm.collective_rpc(event["rpc"], kwargs=event.get("kwargs"))
    else:
        raise ValueError(event)


def generate(
    llm: Any, wanted: list[dict[str, Any]], aborts: dict[str, int], events: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    from vllm import PoolingParams, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    engine = llm.llm_engine
    generate.count = getattr(generate, "count", 0) + 1
    names = {}

    def add(number: int, request: dict[str, Any]) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
        if "salt" in request:
            prompt["cache_salt"] = request["salt"]
        parameters = (
            PoolingParams(task="embed")
            if request.get("embed")
            else SamplingParams(
                **{
                    "max_tokens": request.get("max_tokens", 8),
                    "temperature": 0,
                    "detokenize": False,
                    "logprobs": 1,
                    "ignore_eos": True,
                    "output_kind": RequestOutputKind.FINAL_ONLY,
                    "extra_args": {"kv_transfer_params": request["handed"]} if "handed" in request else None,
                    **request.get("parameters", {}),
                }
            )
        )
        name = f"r{generate.count}-{number}"
        more: dict[str, Any] = {}
        if "kv_hints" in request:
            actions = [KvHintAction(**action) for action in request["kv_hints"]]
            more["kv_hints"] = KvHintsEnvelope(protocol_version="1.0", message_id=name, actions=actions)
        if "lora" in request:
            more["lora_request"] = adapter(request["lora"])
        if "priority" in request:
            more["priority"] = request["priority"]
        names[engine.add_request(name, prompt, parameters, **more) or name] = number
        names[name] = number

    late = sorted(enumerate(wanted), key=lambda each: each[1].get("at", 0))
    outputs: dict[int, dict[str, Any]] = {}
    step = 0
    while late or engine.has_unfinished_requests():
        while late and (late[0][1].get("at", 0) <= step or not engine.has_unfinished_requests()):
            add(*late.pop(0))
        for event in events:
            if event["at"] == step:
                happen(llm, event)
        for number, at in aborts.items():
            if at == step:
                engine.abort_request([f"r{generate.count}-{number}"])
        for output in engine.step():
            if output.finished and wanted[names[output.request_id]].get("embed"):
                data = output.outputs.data.tolist()
                outputs[names[output.request_id]] = {"data": data, "cached": output.num_cached_tokens}
            elif output.finished:
                best = output.outputs[0]
                outputs[names[output.request_id]] = {
                    "tokens": list(best.token_ids),
                    "logprobs": [
                        place[token].logprob
                        for token, place in zip(
                            best.token_ids, best.logprobs or [], strict=bool(best.logprobs)
                        )
                    ],
                    "cached": output.num_cached_tokens,
                    "finish": best.finish_reason,
                    "handed": output.kv_transfer_params,
                    "all": [list(each.token_ids) for each in output.outputs],
                    "prompt_logprobs": [
                        {str(token): place.logprob for token, place in places.items()} if places else None
                        for places in output.prompt_logprobs or ()
                    ],
                }
        step += 1
    return [outputs.get(number, {"finish": "abort"}) for number in range(len(wanted))]


def adapter(given: dict[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(
        given["name"], given["id"], given["path"], load_inplace=bool(given.get("inplace", False))
    )


def runner_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def offloading_of(llm: Any) -> Any:
    """vLLM's manager of its host memory and the tiers below it, where that is its connector."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    return getattr(getattr(connector, "connector_scheduler", None), "manager", None)


def tier_of(offloading: Any) -> Any:
    """Ours, perhaps one of several."""
    return next(tier for tier in offloading.secondary_tiers if type(tier).__name__ == "KVStoreTier")


def note_keys(tier: Any) -> None:
    """All that the tier is asked about, or has to save."""
    lookup, start = tier.lookup, tier._saver.start

    def noting_lookup(key: Any, context: Any) -> Any:
        ASKED.add(bytes(key))
        return lookup(key, context)

    def noting_start(transfer: Any, parents: Any) -> None:
        ASKED.update(map(bytes, transfer.keys))
        start(transfer, parents)

    tier.lookup, tier._saver.start = noting_lookup, noting_start


def drop_group(llm: Any, group: int) -> int:
    from vllm.v1.kv_offload.base import get_offload_group_idx

    from kvstore.types import KEYS_PER_REQUEST_MAX

    tier = tier_of(offloading_of(llm))
    keys = [key for key in ASKED if get_offload_group_idx(key) == group]
    forgotten = 0
    for start in range(0, len(keys), KEYS_PER_REQUEST_MAX):
        forgotten += tier._namespace(10.0).forget(keys=keys[start : start + KEYS_PER_REQUEST_MAX])
    return forgotten


def flush(llm: Any, timeout_s: float) -> dict[str, Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    offloading = offloading_of(llm)
    if offloading is not None:
        scheduler, until = llm.llm_engine.engine_core.engine_core.scheduler, time.monotonic() + timeout_s
        while has_work(scheduler, offloading) and time.monotonic() < until:
            llm.llm_engine.step()
            time.sleep(0.001)
        tier = tier_of(offloading)
        return {
            "flushed": not has_work(scheduler, offloading),
            "worker": {},
            "scheduler": dict(tier.tally.total),
            "tracked": len(tier._requests) + len(tier._waiting) + len(tier._hinted),
            "learnt": tier.choice.compute.known,
        }
    scheduler = ours(llm.llm_engine.engine_core.engine_core.scheduler.connector).scheduler_side
    worker = ours(get_kv_transfer_group()).worker_side
    return {
        "flushed": worker.saver.flush(timeout_s),
        "worker": dict(worker.tally.total),
        "scheduler": dict(scheduler.tally.total),
        "tracked": len(scheduler._requests) + len(scheduler._loading),
        "learnt": scheduler.choice.compute.known,
    }


def has_work(scheduler: Any, offloading: Any) -> bool:
    """Whether anything is to be computed, stored or loaded. vLLM's scheduler would say so as long as there is a tier of
    type p2p, which wants to be asked all the time."""
    open_ones = scheduler.has_unfinished_requests() or scheduler.has_finished_requests()
    waiting = any(state.pending_cascade_keys for state in offloading._req_state.values())
    return bool(open_ones or scheduler.connector.connector_scheduler._jobs or offloading._jobs or waiting)


def ours(connector: Any) -> Any:
    """Our connector, perhaps one of several."""
    connectors = getattr(connector, "_connectors", ())
    return next((each for each in connectors if type(each).__name__ == "KVStoreConnector"), connector)


if __name__ == "__main__":
    main()
