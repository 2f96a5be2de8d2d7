"""Whether a model fits the memory that is free, before anything is read, and what would."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from npmoe.config import EngineConfig, KVCacheConfig, WeightsPolicy, parse_weights
from npmoe.dtypes import gigabytes
from npmoe.errors import OutOfMemory, UnsupportedModel
from npmoe.formats.fragments import RECORD_BYTES, RECORDS
from npmoe.kv.storage import check_kv_format
from npmoe.models.cache import num_state_slots, sequence_bytes, token_bytes
from npmoe.models.conversion import format_bytes, group_as, loaded_formats, running_bytes
from npmoe.models.decode import KV_CODES
from npmoe.models.kernel_layout import prepared_bytes
from npmoe.models.parameters import TABLE, VECTOR
from npmoe.models.stored import OpenModel
from npmoe.models.upload import staging_bytes
from npmoe.runtime.device import free_memory

WORKSPACE_BYTES = 512e6
"""Kept free on a GPU for activations, compiled kernels and graphs."""
SMALLER = ("fp8", "fp4")
"""Formats that are suggested, of weights and of the cache."""


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes.

    passing: beside the weights, while it loads. staying: beside weights and cache, while it runs.
    token: of the cache, for one token in all layers; on a GPU with its cosines and sines, as if
    one sequence took all of the cache.
    """

    weights: float
    passing: float
    staying: float
    token: float

    def tokens(self, free: float, fraction: float) -> int:
        """Tokens that the cache can hold in its fraction of what the weights leave; negative where
        the weights do not fit."""
        if self.weights + max(self.passing, self.staying) > free:
            return -1
        return math.floor(fraction * (free - self.weights - self.staying) / self.token)


def need_of(
    opened: OpenModel,
    policy: WeightsPolicy,
    kv_cache: KVCacheConfig,
    device: str,
    max_num_seqs: int = EngineConfig.max_num_seqs,
    prefill_chunk: int = EngineConfig.prefill_chunk,
) -> Need:
    """What the model takes with recurrent states and copies in windows, where it has any, for so
    many sequences.

    Raises UnsupportedModel and ValueError for formats that the model cannot have.
    """
    spec = opened.spec
    check_kv_format(kv_cache, spec.head_dim)
    token = token_bytes(spec, kv_cache)
    states = num_state_slots(max_num_seqs) * sequence_bytes(spec, kv_cache, prefill_chunk)
    weights = _weight_bytes(opened, policy, device)
    if device == "cpu":
        return Need(weights, 0, states, token)
    rotary = 4 * spec.rope_dim
    return Need(weights, staging_bytes(opened), states + WORKSPACE_BYTES, token + rotary)


def _weight_bytes(opened: OpenModel, policy: WeightsPolicy, device: str) -> float:
    """Bytes of all prepared matrices; on the CPU the embedding stays in the mapped file."""
    formats = loaded_formats(opened, policy, device)
    left_out = (VECTOR, TABLE) if device == "cpu" else (VECTOR,)
    total = 0.0
    for p in opened.parameters:
        if p.part not in left_out:
            name = formats[p.name]
            if device == "cpu":
                total += running_bytes(name, p.shape, group_as(opened.storages[p.name], name))
            elif name in RECORDS:
                total += prepared_bytes(p, name)
            else:  # refused elsewhere, with what there are kernels for
                total += format_bytes(name, p.shape)
    return total


def check_memory(
    opened: OpenModel, policy: WeightsPolicy, device: str, options: EngineConfig
) -> None:
    """Raises OutOfMemory where the weights and the cache that the options ask for do not fit what
    is free, with the settings that would."""
    free, fraction = free_memory(device), options.memory_fraction
    need = need_of(
        opened, policy, options.kv_cache, device, options.max_num_seqs, options.prefill_chunk
    )
    wanted = options.max_seq_len or options.page_size
    if need.tokens(free, fraction) >= wanted:
        return
    raise OutOfMemory(
        f"the model needs {gigabytes(need.weights)} for weights"
        + (f", {gigabytes(max(need.passing, need.staying))} to work in" if need.staying else "")
        + f" and {gigabytes(wanted * need.token)} for the cache of {wanted:,} tokens (at most "
        f"memory_fraction = {fraction:g} of what is left); {gigabytes(free)} are free. "
        + _advice(opened, policy, device, options, free)
    )


def _advice(
    opened: OpenModel, policy: WeightsPolicy, device: str, options: EngineConfig, free: float
) -> str:
    """The settings that change least and fit; with a shorter context where no others do."""
    settings = list(_settings(opened, policy, device, options))
    settings.sort(key=lambda s: (len(s.words), -s.tokens(free, options)))
    wanted = options.max_seq_len or options.page_size
    enough = [s.words for s in settings if s.tokens(free, options) >= wanted]
    changes = [", ".join(words) for words in enough if len(words) == len(enough[0])]
    some = [s for s in settings if s.tokens(free, options) >= options.page_size]
    if options.max_seq_len is not None and some and (not changes or not some[0].words):
        shorter = f"max_seq_len={some[0].tokens(free, options)}"
        changes.append(", ".join([*some[0].words, shorter]))
    if changes:
        return f"What would fit: {'; or '.join(changes)}"
    least = min(s.need.weights + max(s.need.passing, s.need.staying) for s in settings)
    return (
        f"In the formats that it can have here it takes {gigabytes(least)} or more: free memory, "
        "or take a smaller model"
    )


@dataclass(frozen=True)
class _Setting:
    """What one could change, as words, and what the model would need then."""

    words: tuple[str, ...]
    need: Need

    def tokens(self, free: float, options: EngineConfig) -> int:
        """Tokens that the cache would hold."""
        return self.need.tokens(free, options.memory_fraction)


def _settings(
    opened: OpenModel, policy: WeightsPolicy, device: str, options: EngineConfig
) -> Iterator[_Setting]:
    """No change, smaller weights, a smaller cache, and both."""
    weights = [name for name in SMALLER if device == "cpu" or name in RECORD_BYTES]
    caches = [name for name in SMALLER if device == "cpu" or name in KV_CODES]
    for weight in (None, *weights):
        for cache in (None, *caches):
            changed = policy if weight is None else parse_weights(weight)
            kv = options.kv_cache
            if cache is not None:
                kv = replace(kv, key_format=cache, value_format=cache, windows=None)
            words = [f"weights='{weight}'"] * (weight is not None)
            words += [f"kv_cache='{cache}'"] * (cache is not None)
            with suppress(UnsupportedModel, ValueError):  # this model cannot have it
                sizes = options.max_num_seqs, options.prefill_chunk
                need = need_of(opened, changed, kv, device, *sizes)
                yield _Setting(tuple(words), need)
