"""Prompt Cache the slow way, with the plain model and its own cache: what the engine is held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvstore.gpu_worker.assembly import Assembly
from kvstore.gpu_worker.batching import BatchEngine
from kvstore.gpu_worker.promptcache.plan import (
    Job,
    Recipe,
    assemble,
    document_jobs,
    jobs,
    tenant_salt,
)
from kvstore.kernels.rotate.naive import naive_rotate
from kvstore.keys import ROOT
from kvstore.promptcache import ByteTokenizer, Encoding, Layout, Method, parse_prompt, parse_schema
from kvstore.types import ChunkKey

KV = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, [kv_heads, tokens, head_dim]."""
TRIP = """<schema name="trip">You plan trips, in <module name="plan">For <param name="days" length="8"/> days.
<union><module name="rome">Rome has seven hills, and a river.</module>
<module name="oslo">Oslo has a fjord.</module></union></module>
<module name="food">Bread, cheese and olives are eaten everywhere, at any time of the day or night.</module>
<module name="rain" cache="false">It rains.</module> Answer at once. <scaffold modules="plan plan/oslo"/></schema>"""
PROMPT = '<prompt schema="trip"><plan days="3"><oslo/></plan> or less <food/>Where do I go?</prompt>'


def bytes_llama(*, seed: int = 0, dtype: torch.dtype = torch.float32, layers: int = 3) -> LlamaForCausalLM:
    """A tiny model for `ByteTokenizer`."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def encoding_of(
    engine: BatchEngine, schema: str, *, method: Method = Method.BEGINNING, root: ChunkKey = ROOT
) -> Encoding:
    assert engine.namespace is not None
    layout = Layout(parse_schema(schema), ByteTokenizer(), positions_max=1024)
    size = engine.pool.geometry.chunk_tokens
    return Encoding(layout, tenant_salt(engine.namespace.salt, root), chunk_tokens=size, method=method)


def assembly_of(
    engine: BatchEngine, encoding: Encoding, prompt: str, recipe: Recipe | None = None, **options: bool
) -> Assembly:
    placement = encoding.layout.place(parse_prompt(prompt, encoding.layout.schema), **options)
    assert engine.namespace is not None
    found = assemble(
        encoding,
        placement,
        salt=engine.namespace.salt,
        moves=engine.moves,
        recipe=recipe or Recipe(encoding.method),
    )
    assert found is not None
    return found


def encode_all(engine: BatchEngine, encoding: Encoding, root: ChunkKey = ROOT) -> list[Job]:
    """All of a schema, into the store."""
    assert engine.namespace is not None
    return encode_jobs(engine, list(jobs(encoding, salt=engine.namespace.salt, root=root)), root)


def encode_jobs(engine: BatchEngine, made: list[Job], root: ChunkKey = ROOT) -> list[Job]:
    for job in made:
        engine.add(job.assembly.tokens, 1, assembly=job.assembly, root=root)
        for _ in engine.run():
            pass
        assert engine.flush(
            30
        )  # the next one loads what it attends to: the same pieces are computed each time
    return made


def encode_documents(engine: BatchEngine, encoding: Encoding, prompt: str) -> list[Job]:
    """Of a prompt's collections."""
    assert engine.namespace is not None
    placement = encoding.layout.place(parse_prompt(prompt, encoding.layout.schema))
    return encode_jobs(engine, list(document_jobs(encoding, placement, salt=engine.namespace.salt)))


def answer(engine: BatchEngine, assembly: Assembly, count: int, **options: object) -> list[int]:
    number = engine.add(assembly.tokens, count, assembly=assembly, **options)  # type: ignore[arg-type]
    return [output.token for output in engine.run() if output.request == number]


class Plain:
    """KV of chunks by their keys, as the plain model computes them."""

    def __init__(self, model: PreTrainedModel, made: Iterable[Job]) -> None:
        self.model = model
        self.chunks: dict[ChunkKey, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for job in made:
            cache = DynamicCache(config=model.config)
            self._forward(cache, job.assembly.tokens, job.assembly.positions)
            for kept in job.assembly.kept:
                here = slice(kept.first, kept.first + kept.count)
                self.chunks[kept.key] = [
                    (layer.keys[:, :, here], layer.values[:, :, here]) for layer in cache.layers
                ]

    def move(self, assembly: Assembly) -> Assembly:
        """Of a prompt with one module, which was encoded alone and has moved: as if it had been encoded where it is."""
        parts = assembly.parts
        here = slice(parts[0].first, parts[-1].end)
        cache = DynamicCache(config=self.model.config)
        self._forward(cache, assembly.tokens[here], assembly.positions[here])
        for part in parts:
            inside = slice(part.first - here.start, part.end - here.start)
            self.chunks[part.key] = [
                (layer.keys[:, :, inside], layer.values[:, :, inside]) for layer in cache.layers
            ]
        return replace(assembly, parts=tuple(replace(part, delta=0) for part in parts))

    def logits(self, assembly: Assembly, answer: Sequence[int] = ()) -> torch.Tensor:
        """After the prompt, and after each token of an answer but the last, [answer or 1, vocabulary]. Parts that
        moved are not looked at."""
        cache = DynamicCache(config=self.model.config)
        parts = {part.first: part for part in assembly.parts}
        inside = {at for begin, end in assembly.recomputed for at in range(begin, end)}
        at, found = 0, torch.empty(0)
        while at < len(assembly.tokens):
            part = parts.get(at)
            if part is not None and part.key in self.chunks:
                assert part.delta == 0
                for number, (keys, values) in enumerate(self.chunks[part.key]):
                    cache.update(keys, values, number)
                recomputed = [slot for slot in range(at, part.end) if slot in inside]
                if recomputed:  # in place: all that stands behind them in the cache is put back
                    begin, end = recomputed[0], recomputed[-1] + 1
                    assert begin == at and end - begin == len(recomputed)
                    rest = [
                        (layer.keys[:, :, end:].clone(), layer.values[:, :, end:].clone())
                        for layer in cache.layers
                    ]
                    cache.crop(at - part.end)
                    self._forward(cache, assembly.tokens[at:end], assembly.positions[at:end])
                    for number, (keys, values) in enumerate(rest):
                        cache.update(keys, values, number)
                at = part.end
                continue
            end = at + 1
            while end < len(assembly.tokens) and not (end in parts and parts[end].key in self.chunks):
                end += 1
            found = self._forward(cache, assembly.tokens[at:end], assembly.positions[at:end])[-1:]
            at = end
        if len(answer) > 1:
            positions = range(assembly.end, assembly.end + len(answer) - 1)
            found = torch.cat([found, self._forward(cache, answer[:-1], positions)])
        return found

    def kv(self, assembly: Assembly) -> KV:
        """Of a prompt: that of full attention over its text, and where its parts have theirs, that one."""
        cache = DynamicCache(config=self.model.config)
        self._forward(cache, assembly.tokens, assembly.positions)
        found = [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]
        for part in assembly.parts:
            if part.key in self.chunks:
                by = self.model.model.rotary_emb.inv_freq
                for (keys, values), (k, v) in zip(found, self.chunks[part.key], strict=True):
                    keys[:, part.first : part.end] = naive_rotate(k[0], part.delta, by, dtype=torch.float32)
                    values[:, part.first : part.end] = v[0]
        return found

    def over(self, kv: KV, assembly: Assembly, slots: Sequence[int]) -> torch.Tensor:
        """The logits behind the prompt if only `slots` are computed, the last one included; their KV takes the place of
        that in `kv`. Written out for a Llama."""
        model, config = self.model.model, self.model.config
        at = torch.tensor(slots)
        seen = torch.arange(len(assembly.tokens)) <= at[:, None]
        x = model.embed_tokens(torch.tensor(assembly.tokens)[at])
        cos, sin = model.rotary_emb(x[None], torch.tensor(assembly.positions)[at][None])
        group = config.num_attention_heads // config.num_key_value_heads
        for layer, (keys, values) in zip(model.layers, kv, strict=True):
            h, attention = layer.input_layernorm(x), layer.self_attn
            q, k, v = (
                project(h).view(len(at), -1, config.head_dim).transpose(0, 1)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = (each[0] for each in apply_rotary_pos_emb(q[None], k[None], cos, sin))
            keys[:, at], values[:, at] = k, v
            logits = q @ keys.repeat_interleave(group, 0).transpose(1, 2) * config.head_dim**-0.5
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            out = weights @ values.repeat_interleave(group, 0)
            x = x + attention.o_proj(out.transpose(0, 1).reshape(len(at), -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.lm_head(model.norm(x[-1]))  # type: ignore[no-any-return]

    def _forward(self, cache: DynamicCache, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(  # type: ignore[no-any-return]
                torch.tensor([list(tokens)]),
                position_ids=torch.tensor([list(positions)]),
                cache=cache,
                use_cache=True,
            ).logits[0]
