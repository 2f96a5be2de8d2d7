"""The loop: plan a step, run it, choose tokens, end what has ended. Every method takes its turn."""

import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from npmoe.dtypes import Array
from npmoe.engine.output import Choice, Completion, Timings, TokenLogprob
from npmoe.engine.request import Request, Sequence
from npmoe.engine.runner import Runner
from npmoe.engine.scheduler import Scheduler, Work
from npmoe.engine.text import TextStream
from npmoe.ops.sample import candidates_ref, log_softmax, penalize, sample_ref
from npmoe.sampling import SamplingParams
from npmoe.tokenizer import StreamDecoder, Tokenizer


class Engine:
    """Continuous batching over one model. Several threads may call it; steps run one at a time."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        end_ids: frozenset[int],
        max_seq_len: int,
    ) -> None:
        """end_ids: tokens that end a completion. Prompts are shorter than max_seq_len."""
        self.runner, self.scheduler, self.tokenizer = runner, scheduler, tokenizer
        self.end_ids, self.max_seq_len = end_ids, max_seq_len
        self.closed = False
        self._lock, self._next = threading.Lock(), threading.Lock()
        self._owner: dict[Sequence, Request] = {}
        self._aborted: deque[Request] = deque()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Holds the lock. Threads alternate: the next in line holds `_next` while it waits, so a
        thread that steps in a loop queues behind it."""
        held = False
        try:
            with self._next:
                held = self._lock.acquire()
            if self.closed:
                raise RuntimeError("this LLM is closed")
            yield
        finally:
            if held:
                self._lock.release()
            self._drop_aborted()

    @contextmanager
    def _bookkeeping(self) -> Iterator[None]:
        """Wherever an interrupt or an error falls in here, no page and no sequence is lost."""
        try:
            yield
        except BaseException:
            for s in [s for s in self._owner if s.finish_reason is not None]:
                self._retire(s)
            self.scheduler.reset(self._owner)
            raise

    def add(self, prompt_ids: list[int], params: SamplingParams) -> Request:
        """Queues a prompt with resolved params."""
        seed = secrets.randbits(64) if params.seed is None else params.seed
        text = self._text_stream(prompt_ids, params)
        sequence = Sequence(
            list(prompt_ids), len(prompt_ids), params, seed, text, num_forks=params.n - 1
        )
        request = Request([sequence], time.perf_counter())
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        try:
            with self._turn():
                self._owner[sequence] = request
                self.scheduler.add(sequence)
            return request
        except BaseException:
            self.abort(request)
            raise

    def _text_stream(self, prompt_ids: list[int], params: SamplingParams) -> TextStream:
        decoder = None
        if self.tokenizer is not None:
            decoder = StreamDecoder(self.tokenizer, prompt_ids, params.skip_special_tokens)
        return TextStream(decoder, tuple(params.stop))

    def step(self) -> None:
        """Advances every running sequence by one step."""
        with self._turn():
            with self._bookkeeping():
                works = self.scheduler.plan()
                wants_all = [self._wants_prompt_logprobs(work) for work in works]
            if not works:
                return
            logits = self.runner.run(works, wants_all)
            with self._bookkeeping():
                self._use(works, wants_all, logits)

    def _use(self, works: list[Work], wants_all: list[bool], logits: list[Array]) -> None:
        now = time.perf_counter()
        for work, every, rows in zip(works, wants_all, logits, strict=True):
            if every:
                self._record_prompt(work, rows)
            self.scheduler.complete(work)
            if work.sequence.num_pending == 0:
                self._advance(work.sequence, rows[-1], now)

    def _wants_prompt_logprobs(self, work: Work) -> bool:
        s = work.sequence
        recorded = self._owner[s].prompt_logprobs
        return recorded is not None and s.stream == 0 and len(recorded) < s.num_prompt

    def _record_prompt(self, work: Work, rows: Array) -> None:
        """Row i of the chunk speaks of the token after it."""
        s = work.sequence
        recorded = self._owner[s].prompt_logprobs
        assert recorded is not None
        assert s.params.prompt_logprobs is not None
        for i in range(max(s.num_computed, len(recorded) - 1), s.num_computed + work.count):
            if i + 1 < s.num_prompt:
                row = rows[i - s.num_computed]
                recorded.append(_token_logprob(row, s.token_ids[i + 1], s.params.prompt_logprobs))

    def _advance(self, sequence: Sequence, logits: Array, now: float) -> None:
        """Splits off the other completions after the prompt, then adds a token to each."""
        request = self._owner[sequence]
        if request.first_token_at is None:
            request.first_token_at = now
        advancing = [sequence]
        while sequence.num_forks:
            child = Sequence(
                list(sequence.token_ids),
                sequence.num_prompt,
                sequence.params,
                sequence.seed,
                self._text_stream(sequence.token_ids, sequence.params),
                stream=len(request.sequences),
            )
            self._owner[child] = request
            request.sequences.append(child)
            sequence.num_forks -= 1
            copy = self.scheduler.fork(sequence, child)
            if copy is not None:
                self.runner.cache.copy_page(*copy)
            if child.num_computed:
                advancing.append(child)
        for s in advancing:
            self._append_token(s, logits)
            if s.finish_reason is not None:
                self._finish(s)

    def _append_token(self, s: Sequence, raw_logits: Array) -> None:
        p = s.params
        assert p.max_tokens is not None
        assert p.min_tokens is not None
        count = len(s.token_ids) - s.num_prompt
        ends = set(p.stop_token_ids) | (frozenset() if p.ignore_eos else self.end_ids)
        token = self._choose(s, raw_logits, ends if count < p.min_tokens else set())
        if p.logprobs is not None:
            s.logprobs.append(_token_logprob(raw_logits, token, p.logprobs))
        s.token_ids.append(token)
        count += 1
        if token in ends:
            s.text.finish()
            s.finish_reason = "stop"
            return
        s.text.push(token, may_stop=count >= p.min_tokens)
        if s.text.stopped:
            s.finish_reason = "stop"
        elif count >= p.max_tokens or len(s.token_ids) >= self.max_seq_len:
            s.text.finish()
            s.finish_reason = "stop" if s.text.stopped else "length"

    def _choose(self, s: Sequence, raw_logits: Array, forbidden: set[int]) -> int:
        p = s.params
        assert p.temperature is not None
        assert p.top_k is not None
        assert p.top_p is not None
        assert p.min_p is not None
        assert p.repetition_penalty is not None
        logits = raw_logits.copy()
        for token, bias in p.logit_bias.items():
            logits[token] += np.float32(bias)
        if p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty:
            tokens = np.asarray(s.token_ids, np.int64)
            penalize(
                logits,
                tokens[: s.num_prompt],
                tokens[s.num_prompt :],
                p.repetition_penalty,
                p.presence_penalty,
                p.frequency_penalty,
            )
        logits[list(forbidden)] = -np.inf
        return sample_ref(
            logits,
            p.temperature,
            p.top_k,
            p.top_p,
            p.min_p,
            s.seed,
            position=len(s.token_ids),
            stream=s.stream,
        )

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        request = self._owner.pop(sequence)
        if all(s.finish_reason is not None for s in request.sequences):
            request.finished_at = time.perf_counter()

    def abort(self, request: Request) -> None:
        """Ends a request early and frees its pages, at the latest when the step in progress ends;
        nothing happens if it has ended. Never waits: the garbage collector may close a generator
        anywhere, in the middle of a step too."""
        self._aborted.append(request)
        self._drop_aborted()

    def _drop_aborted(self) -> None:
        while self._aborted and self._lock.acquire(blocking=False):
            try:
                with self._bookkeeping():
                    while self._aborted:
                        for sequence in self._aborted[0].sequences:
                            if self._owner.pop(sequence, None):
                                self.scheduler.finish(sequence)
                        self._aborted.popleft()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Waits for the step in progress, then lets model and cache go."""
        with suppress(RuntimeError), self._turn():
            self.closed = True
            del self.runner

    def completion(self, request: Request) -> Completion:
        """The answer of a request that is done."""
        assert request.done
        assert request.first_token_at is not None
        assert request.finished_at is not None
        first = request.sequences[0]
        most = max(len(s.output_ids) for s in request.sequences)
        decoding = request.finished_at - request.first_token_at
        timings = Timings(
            request.first_token_at - request.started,
            decoding / (most - 1) if most > 1 else 0.0,
            request.finished_at - request.started,
        )
        choices = [
            Choice(
                s.text.text,
                s.output_ids,
                s.finish_reason or "",
                s.logprobs if s.params.logprobs is not None else None,
            )
            for s in request.sequences
        ]
        prompt_ids = first.token_ids[: first.num_prompt]
        return Completion(prompt_ids, choices, timings, request.prompt_logprobs)

    def forward(self, token_ids: list[int]) -> Array:
        """Logits float32 `[T, vocab]` of a token list, in chunks, on pages of its own."""
        params = SamplingParams(max_tokens=1, prompt_logprobs=0).resolve({})
        s = Sequence(list(token_ids), len(token_ids), params, 0, TextStream(None, ()))
        rows = []
        with self._turn(), self._bookkeeping():
            self.scheduler.claim_pages(s)
            while s.num_pending:
                work = Work(s, min(s.num_pending, self.scheduler.prefill_chunk))
                rows += self.runner.run([work], [True])
                s.num_computed += work.count
            self.scheduler.finish(s)
        return np.concatenate(rows)


def _token_logprob(logits: Array, token: int, alternatives: int) -> TokenLogprob:
    logprobs = log_softmax(logits)
    best = candidates_ref(logits, 1.0, alternatives, 1.0, 0.0)[0] if alternatives else ()
    return TokenLogprob(token, float(logprobs[token]), {int(i): float(logprobs[i]) for i in best})
