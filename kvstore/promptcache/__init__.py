"""Prompt Cache (arXiv 2311.04934): prompts made of parts whose KV is stored once and reused wherever the parts recur.

    text of a schema ──parse_schema──▶ Schema ──Layout(tokenizer)──▶ positions ──Encoding(salt)──▶ chunk keys
    text of a prompt ──parse_prompt──▶ Prompt ──Layout.place─────▶ runs: what is loaded, what is computed, and where

No model, engine or daemon is needed here. docs/promptcache.md describes the language and its rules.
"""

from kvstore.promptcache.encoding import Encoding, Method, changes
from kvstore.promptcache.functions import PromptFunction, prompt_function
from kvstore.promptcache.layout import Layout, Placement, Run
from kvstore.promptcache.markup import PmlError
from kvstore.promptcache.prompt import Prompt, parse_prompt
from kvstore.promptcache.schema import Schema, parse_schema
from kvstore.promptcache.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "Encoding",
    "HuggingFaceTokenizer",
    "Layout",
    "Method",
    "Placement",
    "PmlError",
    "Prompt",
    "PromptFunction",
    "Run",
    "Schema",
    "Tokenizer",
    "changes",
    "load_tokenizer",
    "parse_prompt",
    "parse_schema",
    "prompt_function",
]
