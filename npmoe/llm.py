"""`LLM`: load a checkpoint, generate, stream, chat, or take the logits.

Threads: every method may be called from any thread; the engine runs one step at a time under a
lock, and concurrent requests share its steps. `close` waits for the step in progress.
"""

import math
import os
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np

from npmoe.batch import Batch
from npmoe.checkpoint import read_json
from npmoe.config import EngineConfig, KVCacheConfig, parse_weights, token_ids
from npmoe.dtypes import Array, gigabytes
from npmoe.engine.engine import Engine
from npmoe.engine.output import Completion
from npmoe.engine.request import Request
from npmoe.engine.runner import Runner
from npmoe.engine.scheduler import Scheduler
from npmoe.errors import (
    NumericalError,
    OutOfMemory,
    PromptError,
    TokenizerError,
    UnsupportedModel,
)
from npmoe.kv.pages import PageAllocator
from npmoe.kv.storage import check_kv_format
from npmoe.models.cache import ModelCache, num_state_slots, sequence_bytes, token_bytes
from npmoe.models.conversion import loaded_formats, part_formats
from npmoe.models.gpu import GpuModel, check_gpu_support
from npmoe.models.layers import CausalLM
from npmoe.models.loader import load_model
from npmoe.models.memory import check_memory
from npmoe.models.stored import open_model
from npmoe.ops.linear import FEW_TOKENS
from npmoe.runtime.device import free_memory, resolve_device
from npmoe.runtime.failures import named_errors
from npmoe.runtime.progress import say
from npmoe.runtime.resources import folder
from npmoe.sampling import SamplingParams
from npmoe.tokenizer import Message, Tokenizer

Prompt = str | Sequence[int]
COMPILE_NOTICE_SECONDS = 1.5


def shipped_model() -> str:
    """The folder of the demonstration model that comes with npmoe."""
    return str(folder("weights") / "storyteller")


class LLM:
    """A language model, loaded and ready.

    Usable as a context manager; `close()` frees weights and cache.
    """

    def __init__(
        self,
        path: str | os.PathLike | None = None,
        *,
        device: str = "auto",
        weights: str | dict[str, str] = "native",
        kv_cache: str | tuple[str, str] | KVCacheConfig = "bf16",
        max_seq_len: int | None = None,
        max_num_seqs: int = 16,
        page_size: int = 16,
        prefill_chunk: int = 512,
        memory_fraction: float = 0.5,
        ignore_config_keys: Iterable[str] = (),
        progress: bool = True,
        nvtx: bool = False,
        check_finite: bool = False,
    ) -> None:
        """Loads a checkpoint.

        path: a folder with config.json and safetensors, a model org/name in the local Hugging Face
        cache, or None for the demonstration model.
        device: "auto" (the GPU if there is one), "cpu" or "cuda".
        weights: "native" keeps the checkpoint's formats; a format ("fp4", "fp8", "int8", ...) or a
        dict part -> format (parts: experts, mlp, attention, lm_head) converts at load.
        kv_cache: format of cached keys and values, a pair of formats, or a KVCacheConfig; words as
        `KVCacheConfig.parse` reads them.
        max_seq_len: longest prompt + completion in tokens; None takes the model's own limit, or
        what memory_fraction of the free memory holds if that is less.
        max_num_seqs: sequences that run at once. page_size: tokens a page of the cache.
        prefill_chunk: most prompt tokens of one step; windows have copies of as many tokens.
        ignore_config_keys: config.json keys that you know to have no effect.
        progress: bars and messages on standard error.
        nvtx: on a GPU, marks each step, layer and op as an NVTX range for a profiler; steps run
        without CUDA graphs then, and slower.
        check_finite: on a GPU, looks at the keys and values of every layer before they are cached,
        for debugging: steps run without CUDA graphs and wait for the host. The CPU always looks.
        If one is NaN or infinite, a request raises NumericalError; then load the model anew.

        Raises CheckpointError, UnsupportedModel, TokenizerError, OutOfMemory, DeviceError, and
        ValueError for an argument out of range.
        """
        self._quiet = not progress
        self._options = options = EngineConfig(
            kv_cache=KVCacheConfig.parse(kv_cache),
            max_seq_len=max_seq_len,
            max_num_seqs=max_num_seqs,
            page_size=page_size,
            prefill_chunk=prefill_chunk,
            memory_fraction=memory_fraction,
        )
        policy = parse_weights(weights)
        if isinstance(ignore_config_keys, str) or not isinstance(ignore_config_keys, Iterable):
            raise ValueError(
                f"ignore_config_keys = {ignore_config_keys!r}: expected a list of keys"
            )
        self.device = resolve_device(device)
        if nvtx and self.device == "cpu":
            raise ValueError("nvtx = True: NVTX ranges are drawn on a GPU; on the CPU leave it out")
        self._nvtx, self._check_finite = nvtx, check_finite
        opened = open_model(shipped_model() if path is None else path, tuple(ignore_config_keys))
        self.config = opened.config
        self.spec = opened.spec
        check_kv_format(options.kv_cache, self.spec.head_dim)
        if self.device == "cuda":
            formats = part_formats(opened, loaded_formats(opened, policy, "cuda"))
            check_gpu_support(self.spec, formats, {}, options.kv_cache)
        source = opened.checkpoint.folder
        self.tokenizer = Tokenizer.find(source)
        if self.tokenizer is not None and self.tokenizer.vocab_size > self.config.vocab_size:
            raise TokenizerError(
                f"{source}: the tokenizer has {self.tokenizer.vocab_size} tokens, the model's "
                f"vocabulary {self.config.vocab_size}"
            )
        generation = source / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self._generation_end_ids = token_ids(
            self.generation_config.get("eos_token_id"), str(generation)
        )
        try:
            SamplingParams().resolve(self.generation_config)
        except (ValueError, TypeError) as error:
            raise UnsupportedModel(f"{generation}: {error}") from None
        self._check_length(options.max_seq_len)
        with named_errors():
            check_memory(opened, policy, self.device, options)
            model = load_model(opened, policy, self.device, self._quiet)
            if isinstance(model, CausalLM):
                self._warm_up(model, options)
            self._engine: Engine | None = self._make_engine(model, options)

    def _check_length(self, max_seq_len: int | None) -> None:
        if max_seq_len is not None and max_seq_len > self.config.max_position_embeddings:
            raise ValueError(
                f"max_seq_len = {max_seq_len}: the model's max_position_embeddings is "
                f"{self.config.max_position_embeddings}"
            )

    def _warm_up(self, model: CausalLM, options: EngineConfig) -> None:
        """Runs few and many tokens once, so that compilation does not fall into a request."""
        notice = threading.Timer(
            COMPILE_NOTICE_SECONDS,
            say,
            ("compiling CPU kernels for this machine; later runs find them on disk", self._quiet),
        )
        notice.start()
        try:
            for count in (1, FEW_TOKENS + 1):
                cache = ModelCache(self.spec, 1, FEW_TOKENS + 1, options.kv_cache)
                span = np.arange(count, dtype=np.int32)
                ends, length = np.array([0, count], np.int32), np.array([count], np.int32)
                table, last = np.zeros((1, 1), np.int32), span[-1:]
                variant = None if self.spec.longrope_switch is None else span * 0
                ids = span % self.config.vocab_size
                slots = table[0] if cache.has_slots else None
                batch = Batch(ids, span, span, ends, length, table, last, variant, slots)
                with suppress(NumericalError):  # of tokens that belong to no request
                    model.forward(batch, cache.layers)
        finally:
            notice.cancel()

    def _make_engine(self, model: CausalLM | GpuModel, options: EngineConfig) -> Engine:
        spec, kv, size = self.spec, options.kv_cache, options.page_size
        per_token, slots = token_bytes(spec, kv), num_state_slots(options.max_num_seqs)
        free = free_memory(self.device) - slots * sequence_bytes(spec, kv, options.prefill_chunk)
        fitting = max(0, int(options.memory_fraction * free / (per_token * size)))
        wanted = options.max_seq_len or self.config.max_position_embeddings
        if fitting * size < wanted and (options.max_seq_len is not None or fitting == 0):
            raise OutOfMemory(
                f"max_seq_len = {wanted} needs {gigabytes(wanted * per_token)} of KV cache; "
                f"memory_fraction = {options.memory_fraction:g} of the {gigabytes(free)} free "
                f"holds {fitting * size} tokens. Lower max_seq_len, choose a smaller kv_cache "
                "format, or raise memory_fraction."
            )
        self.max_seq_len = min(wanted, fitting * size)
        pages_each = math.ceil(self.max_seq_len / size)
        num_pages = min(options.max_num_seqs * pages_each, fitting)
        scratch_pages = 1 if isinstance(model, GpuModel) else 0
        pages = num_pages + scratch_pages
        cache = ModelCache(spec, pages, size, kv, slots, self.device, options.prefill_chunk)
        if isinstance(model, GpuModel):
            debugging = self._nvtx, self._check_finite
            model.bind(cache.pages, pages_each, options.max_num_seqs, *debugging)
        short = "" if self.max_seq_len == wanted else f" (the model allows {wanted:,})"
        say(
            f"context {self.max_seq_len:,} tokens{short}, KV cache {kv}, "
            f"up to {gigabytes(cache.nbytes)} for {num_pages * size:,} tokens",
            self._quiet,
        )
        scheduler = Scheduler(
            PageAllocator(num_pages, size),
            options.max_num_seqs,
            options.prefill_chunk,
            spec.longrope_switch,
            spec.delta_net is not None,
            kv.windows is not None,
        )
        end_ids = {*self.config.eos_token_ids, *self._generation_end_ids}
        runner = Runner(model, cache, size)
        possible = frozenset(i for i in end_ids if 0 <= i < self.config.vocab_size)
        return Engine(runner, scheduler, self.tokenizer, possible, self.max_seq_len)

    @property
    def engine(self) -> Engine:
        """The engine; RuntimeError after `close`."""
        if self._engine is None:
            raise RuntimeError("this LLM is closed")
        return self._engine

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> Any:
        """Completes one prompt (-> Completion) or a list of prompts (-> list of Completion).

        A prompt is text or a list of token ids. Prompts of a list run together.
        Raises PromptError for an empty or too long prompt and ValueError for bad params.
        """
        single = isinstance(prompts, str) or _is_ids(prompts)
        items: list[Any] = [prompts] if single else list(prompts)
        resolved = self._resolve(params)
        encoded = [self._encode(p, resolved) for p in items]  # all are checked before one runs
        engine, requests = self.engine, []
        try:
            for ids in encoded:
                requests.append(engine.add(ids, resolved))
            while not all(r.done for r in requests):
                with named_errors():
                    engine.step()
            completions = [engine.completion(r) for r in requests]
        finally:
            for r in requests:
                engine.abort(r)
        return completions[0] if single else completions

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[str, None, Completion]:
        """Yields the completion's text piece by piece; the generator returns the Completion.

        Leaving the loop early frees the request's pages. Needs n = 1. Without a tokenizer there are
        no pieces, only the Completion.
        """
        resolved = self._resolve(params)
        if resolved.n != 1:
            raise ValueError(f"n = {resolved.n}: a stream has one completion")
        return self._stream(self.engine, self._encode(prompt, resolved), resolved)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """The reply to a conversation, [{"role": "user", "content": "..."}, ...], in the
        checkpoint's chat template. Raises TokenizerError if it has none."""
        return self.generate([self._chat_ids(messages)], params)[0]

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> Generator[str, None, Completion]:
        """Like `stream`, for a conversation; pages of earlier turns are found in the cache."""
        return self.stream(self._chat_ids(messages), params)

    def forward(self, token_ids: Sequence[int]) -> Array:
        """Logits of every position: token ids `[T]` -> float32 `[T, vocab]`."""
        ids = self._check_ids(token_ids, self.max_seq_len)
        with named_errors():
            return self.engine.forward(ids)

    def with_kv_cache(self, kv_cache: str | tuple[str, str] | KVCacheConfig) -> "LLM":
        """The same weights, shared and not loaded again, with an empty cache of another format.

        Closing one of the two leaves the other. Raises ValueError for an unknown format and on a
        GPU, where the steps are made for one cache; UnsupportedModel, OutOfMemory.
        """
        model = self.engine.runner.model
        if isinstance(model, GpuModel):
            raise ValueError("device = 'cuda': a GPU's steps have one cache; load another LLM")
        options = replace(self._options, kv_cache=KVCacheConfig.parse(kv_cache))
        check_kv_format(options.kv_cache, self.spec.head_dim)
        other = copy(self)
        other._options = options
        other._warm_up(model, options)
        other._engine = other._make_engine(model, options)
        return other

    def close(self) -> None:
        """Frees weights and cache; afterwards every method raises RuntimeError."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _stream(
        self, engine: Engine, ids: list[int], params: SamplingParams
    ) -> Generator[str, None, Completion]:
        request: Request = engine.add(ids, params)
        try:
            done = False
            while not done:
                with named_errors():
                    engine.step()
                done = request.done  # another thread's step may have ended it
                piece = request.sequences[0].text.take()
                if piece:
                    yield piece
            return engine.completion(request)
        finally:
            engine.abort(request)

    def _resolve(self, params: SamplingParams | None) -> SamplingParams:
        if not isinstance(params, SamplingParams | None):
            raise ValueError(f"params = {params!r}: expected SamplingParams")
        resolved = (params or SamplingParams()).resolve(self.generation_config)
        if resolved.stop and self.tokenizer is None:
            raise ValueError("stop: this checkpoint has no tokenizer; use stop_token_ids")
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(resolved, name):
                if token >= self.config.vocab_size:
                    raise ValueError(
                        f"{name}: token {token}; legal ids are 0 to {self.config.vocab_size - 1}"
                    )
        return resolved

    def _encode(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        if not isinstance(prompt, str):
            return self._check_ids(prompt, self.max_seq_len - 1)
        if self.tokenizer is None:
            raise PromptError("this checkpoint has no tokenizer.json: pass token ids, not text")
        return self._check_ids(self.tokenizer.encode(prompt), self.max_seq_len - 1)

    def _chat_ids(self, messages: Sequence[Message]) -> list[int]:
        if self.tokenizer is None:
            raise PromptError("this checkpoint has no tokenizer.json: chat needs one")
        return self.tokenizer.apply_chat_template(messages)

    def _check_ids(self, prompt: Sequence[int], longest: int) -> list[int]:
        if not isinstance(prompt, Sequence | np.ndarray):
            raise PromptError(f"prompt {prompt!r}: expected text or a list of token ids")
        ids = list(prompt)
        if not ids:
            raise PromptError("the prompt is empty: pass at least one token")
        if len(ids) > longest:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, the context takes {longest}; shorten it, or "
                f"load with a larger max_seq_len (now {self.max_seq_len}, the model's limit is "
                f"{self.config.max_position_embeddings})"
            )
        for token in ids:
            if not isinstance(token, int | np.integer) or not 0 <= token < self.config.vocab_size:
                raise PromptError(
                    f"token id {token!r}: legal ids are 0 to {self.config.vocab_size - 1}"
                )
        return [int(token) for token in ids]


def _is_ids(prompt: Any) -> bool:
    """Whether this is one prompt in token ids rather than a list of prompts."""
    if not isinstance(prompt, Sequence | np.ndarray):
        raise PromptError(f"prompt {prompt!r}: expected text, token ids, or a list of prompts")
    return len(prompt) > 0 and isinstance(prompt[0], int | np.integer)
