"""The loop: plan a step, run it, choose tokens, end what has ended. Every method takes its turn.

A model that samples chooses all tokens but a completion's first, and runs one step ahead of the
host as long as the same sequences go on.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from npmoe.dtypes import Array
from npmoe.engine.output import Choice, Completion, Timings, TokenLogprob
from npmoe.engine.pipeline import Pipeline
from npmoe.engine.request import Request, Sequence
from npmoe.engine.runner import Runner
from npmoe.engine.scheduler import Scheduler, Work
from npmoe.engine.text import TextStream
from npmoe.ops.sample import Chooser, Sampled, report
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
        self._pipeline = runner.pipeline
        self._blocked: list[Sequence] | None = None

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
            self._pipeline.clear()
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
            try:
                self._step()
            except BaseException:
                self._pipeline.clear()
                if self.scheduler.has_slots:  # they may hold tokens that were not recorded
                    self.scheduler.reset(self._owner)
                raise

    def _step(self) -> None:
        if self._pipeline.in_flight:
            alive = any(s in self._owner for s in self._pipeline.sequences)
            self._decode()
            if alive:
                return
        with self._bookkeeping():
            works = self.scheduler.plan()
            decoding = [work for work in works if self._is_sampled(work)]
            others = [work for work in works if not self._is_sampled(work)]
            wants_all = [self._wants_prompt_logprobs(work) for work in others]
            self._blocked = None if others else list(self.scheduler.waiting)
        if others:
            logits = self.runner.run(others, wants_all)
            with self._bookkeeping():
                self._use(others, wants_all, logits)
        while decoding:
            group = decoding[: self._pipeline.max_seqs]
            decoding = decoding[len(group) :]
            self.runner.start(group, [self._chooser(work.sequence) for work in group])
            self._decode()

    def _is_sampled(self, work: Work) -> bool:
        """Whether the model chooses the next token: logits of the first are shared by n."""
        decoding = work.reaches_end and work.count == 1
        return self._pipeline.max_seqs > 0 and decoding and bool(work.sequence.output_ids)

    def _decode(self) -> None:
        """Lets the model begin another step, if it may, and uses the oldest one's tokens."""
        with self._bookkeeping():
            ahead = self._may_run_ahead()
        if ahead:
            self._pipeline.enqueue()
        self._take()

    def _take(self) -> None:
        """Uses the tokens of the oldest step in flight."""
        tokens = self._pipeline.take()
        with self._bookkeeping():
            for sequence, sampled in tokens:
                if sequence in self._owner:  # else it has ended, and this token comes after its end
                    self.scheduler.complete(Work(sequence, 1))
                    self._append_token(sequence, sampled)

    def _may_run_ahead(self) -> bool:
        """Whether the next step is of the same sequences, as far as one can know; claims pages.

        Those that wait were offered a place when these began; a place comes with another plan.
        """
        sequences, scheduler = self._pipeline.sequences, self.scheduler
        return (
            scheduler.running == sequences
            and list(scheduler.waiting) == self._blocked
            and scheduler.longrope_switch is None
            and not any(self._is_full(s, 1) for s in sequences)
            and scheduler.grow_ahead(sequences)
        )

    def _is_full(self, s: Sequence, more: int) -> bool:
        """Whether the sequence is at its end once it has so many tokens more."""
        assert s.params.max_tokens is not None
        length = len(s.token_ids) + more
        return length - s.num_prompt >= s.params.max_tokens or length >= self.max_seq_len

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
                sampled = report(row, s.token_ids[i + 1], s.params.prompt_logprobs)
                recorded.append(_token_logprob(sampled))

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
            if child.state_slot is not None:
                assert sequence.state_slot is not None
                self.runner.cache.copy_state(sequence.state_slot, child.state_slot)
                advancing.append(child)
        for s in advancing:
            self._append_token(s, self._sample(s, logits))

    def _sample(self, s: Sequence, logits: Array) -> Sampled:
        """The next token, chosen here."""
        token = self._choose(s, logits)
        wanted = s.params.logprobs
        return Sampled(token) if wanted is None else report(logits, token, wanted)

    def _choose(self, s: Sequence, logits: Array) -> int:
        return self._chooser(s).choose(logits)

    def _chooser(self, s: Sequence) -> Chooser:
        ends = self._ends(s)
        return Chooser(s.params, s.token_ids, s.num_prompt, s.seed, s.stream, ends)

    def _ends(self, s: Sequence) -> frozenset[int]:
        """Tokens that end a completion."""
        stops = frozenset(s.params.stop_token_ids)
        return stops if s.params.ignore_eos else stops | self.end_ids

    def _append_token(self, s: Sequence, sampled: Sampled) -> None:
        """Adds a token; a sequence that ends with it leaves."""
        p = s.params
        assert p.min_tokens is not None
        if p.logprobs is not None:
            s.logprobs.append(_token_logprob(sampled))
        s.token_ids.append(sampled.token_id)
        if sampled.token_id in self._ends(s):
            s.text.finish()
            s.finish_reason = "stop"
        else:
            may_stop = len(s.token_ids) - s.num_prompt >= p.min_tokens
            s.text.push(sampled.token_id, may_stop)
            if not s.text.stopped and self._is_full(s, 0):
                s.text.finish()
                s.finish_reason = "length"
            if s.text.stopped:
                s.finish_reason = "stop"
        if s.finish_reason is not None:
            self.scheduler.finish(s)
            self._retire(s)

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
            try:
                self._pipeline.close()
            finally:
                self._pipeline = Pipeline(None)
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
        return np.concatenate(list(self.forward_chunks(token_ids)))

    def forward_chunks(self, token_ids: list[int]) -> Generator[Array, None, None]:
        """The same logits, `[chunk, vocab]` at a time, for a vocabulary too large to hold them all.

        Every other call waits until the last chunk was taken or the generator is closed.
        """
        params = SamplingParams(max_tokens=1, prompt_logprobs=0).resolve({})
        s = Sequence(list(token_ids), len(token_ids), params, 0, TextStream(None, ()))
        with self._turn(), self._bookkeeping():
            while self._pipeline.in_flight:
                self._take()
            self.scheduler.claim_pages(s)
            while s.num_pending:
                work = Work(s, min(s.num_pending, self.scheduler.prefill_chunk))
                yield from self.runner.run([work], [True])
                s.num_computed += work.count
            self.scheduler.finish(s)


def _token_logprob(sampled: Sampled) -> TokenLogprob:
    assert sampled.logprob is not None
    return TokenLogprob(sampled.token_id, sampled.logprob, sampled.top)
