"""One prompt on its way through the engine; plain data, no arrays."""

from dataclasses import dataclass, field

from npmoe.engine.output import TokenLogprob
from npmoe.engine.text import TextStream
from npmoe.sampling import SamplingParams


@dataclass(eq=False)
class Sequence:
    """A prompt with one of its completions.

    token_ids: prompt and completion. num_computed: leading tokens whose K and V are in `pages`.
    stream: which of the n completions (also keys the random numbers). sealed_keys: prefix keys of
    the full pages. long_rope: whether keys are turned by longrope's long factors. num_forks:
    completions still to be split off when the prompt is done. state_slot: where the recurrent
    states of num_computed tokens are, and copies of them; None while it does not run.
    """

    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    text: TextStream
    stream: int = 0
    num_forks: int = 0
    num_computed: int = 0
    long_rope: bool = False
    state_slot: int | None = None
    pages: list[int] = field(default_factory=list)
    sealed_keys: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def num_pending(self) -> int:
        """Tokens whose K and V are still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def output_ids(self) -> list[int]:
        """The completion's tokens so far."""
        return self.token_ids[self.num_prompt :]


@dataclass(eq=False)
class Request:
    """A prompt and its n sequences, with the clock readings that timings are made of."""

    sequences: list[Sequence]
    started: float
    prompt_logprobs: list[TokenLogprob | None] | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def done(self) -> bool:
        """Whether every completion has ended; set last, so that other threads may ask."""
        return self.finished_at is not None
