"""What vLLM's loader gives to a model, digested as it goes by.

On a CPU vLLM packs the weights of linear layers for its kernels and drops the tensors, so that nobody can look at them
afterwards; quantised layers do so anywhere. `register` is vLLM's hook for that (entry point `vllm.general_plugins`): it
runs in each of vLLM's processes before a model is made. It changes nothing but this: a model that will be used with the
store notes what is loaded into it, at first and whenever weights are loaded anew.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

OURS = "kvstore"
"""Occurs in every configuration of KV transfer that uses the store."""
log = logging.getLogger(__name__)


class Loaded:
    """The tensors that were loaded into one model, by their names in the checkpoint; a later one takes the place of an
    earlier one of the same name."""

    def __init__(self, *, contents: bool, parameters: Mapping[str, int] | None = None) -> None:
        """`contents`: digest what is loaded; else only count the loads. `parameters`: the model's, by name, when it was
        made, with a number for each tensor: quantised layers drop some once they have packed them."""
        self.loads = 0
        """Calls of `load_weights` that have begun."""
        self.filled: set[str] = set()
        """Names of parameters of the model, as far as the model says which it has filled."""
        self.broken = ""
        """Why the contents are not known."""
        self.contents = contents
        self.parameters = frozenset(parameters or ())
        self._numbers = dict(parameters or {})
        """A module that two others hold has its parameters under two names, and a model says one of them."""
        self._digests: dict[str, bytes] = {}
        self._history = b""
        """Digest of what was loaded under other names, a part of which may still count."""

    def fills(self) -> frozenset[str]:
        """All names of the parameters that were filled."""
        filled = {self._numbers[name] for name in self.filled if name in self._numbers}
        return frozenset(self.filled) | {name for name, number in self._numbers.items() if number in filled}

    def digest(self) -> bytes:
        """32 bytes over all names and contents."""
        from kvstore.gpu_worker.identity import absorb

        state = hashlib.blake2b(digest_size=32, person=b"kvs.loaded.v1")
        absorb(state, self._history)
        for name, digest in sorted(self._digests.items()):
            absorb(state, name.encode(), digest)
        return state.digest()

    def load(self, load_weights: Callable[..., Any], weights: Iterable[tuple[str, Any]]) -> Any:
        """What `load_weights(weights)` returns. Raises what it raises; then the contents are not known any more, until
        all that was loaded before is loaded again."""
        self.loads += 1
        broken, self.broken = self.broken, "loading weights has not ended"
        seen: dict[str, bytes] = {}
        try:
            filled = load_weights(self._seen(weights, seen))
        except BaseException:
            self._digests.update(seen)  # these must come again too
            raise
        self.broken = "" if seen.keys() >= self._digests.keys() else broken
        self._take(seen, set(filled or ()))
        return filled

    def _take(self, seen: dict[str, bytes], filled: set[str]) -> None:
        """Some models take the same weights under more than one name. Of new names that fill what was filled, nobody
        knows which older names they have replaced: what was known by then becomes history, and counts as such."""
        replaced = not self.filled.isdisjoint(filled)
        if replaced and seen.keys() - self._digests.keys() and self._digests.keys() - seen.keys():
            self._history = self.digest()
            self._digests = {}
        self._digests.update(seen)
        self.filled |= filled

    def _seen(self, weights: Iterable[tuple[str, Any]], seen: dict[str, bytes]) -> Iterator[tuple[str, Any]]:
        from kvstore.gpu_worker.identity import digest_of_tensor

        for name, tensor in weights:
            if self.contents:
                described = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
                seen[name] = described + digest_of_tensor(tensor)
            yield name, tensor


_loaded: weakref.WeakKeyDictionary[Any, Loaded] = weakref.WeakKeyDictionary()


def loaded_into(model: Any) -> Loaded | None:
    """None: the model was made before `watch` could look."""
    return _loaded.get(model)


def watch(model: Any, *, contents: bool) -> Loaded:
    """From now on notes what is loaded into the model. Idempotent."""
    if (known := _loaded.get(model)) is not None:
        return known
    parameters = {name: id(tensor) for name, tensor in model.named_parameters(remove_duplicate=False)}
    loaded = _loaded[model] = Loaded(contents=contents, parameters=parameters)
    original = getattr(model, "load_weights", None)
    if original is None:
        return loaded

    @functools.wraps(original)
    def load_weights(weights: Iterable[tuple[str, Any]], *args: Any, **kwargs: Any) -> Any:
        return loaded.load(lambda each: original(each, *args, **kwargs), weights)

    model.load_weights = load_weights
    return loaded


def register() -> None:
    """Called by vLLM. Raises nothing: an engine works without, and then without the store where it is needed."""
    try:
        from vllm.model_executor.model_loader.base_loader import BaseModelLoader

        original = BaseModelLoader.create_model
    except (ImportError, AttributeError) as error:
        log.warning("this vLLM does not show what it loads: %s", error)
        return
    if hasattr(original, "__wrapped__") and getattr(original, "watches", False):
        return

    @functools.wraps(original)
    def create_model(loader: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(loader, vllm_config, *args, **kwargs)
        if OURS in repr(getattr(vllm_config, "kv_transfer_config", None)):
            device = str(getattr(vllm_config.device_config, "device_type", "cpu"))
            quantised = getattr(vllm_config.model_config, "quantization", None) is not None
            watch(model, contents=device == "cpu" or quantised)
        return model

    create_model.watches = True  # type: ignore[attr-defined]
    BaseModelLoader.create_model = create_model
