"""What a request gives back."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log probability of one token, and of the most probable alternatives by token id."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Timings:
    """Seconds on the wall clock.

    time_to_first_token: from the request to its first token. time_per_output_token: mean of the
    tokens after the first, 0 if there are none. total: the whole request.
    """

    time_to_first_token: float
    time_per_output_token: float
    total: float


@dataclass(frozen=True)
class Choice:
    """One completion of a prompt. finish_reason: "stop" (an end token, stop token or stop string)
    or "length" (max_tokens, or the context is full)."""

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt: `choices` holds n completions; the properties speak of the first.

    prompt_logprobs has one entry a prompt token; the first token has none.
    """

    prompt_token_ids: list[int]
    choices: list[Choice]
    timings: Timings
    prompt_logprobs: list[TokenLogprob | None] | None = field(default=None)

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Log probabilities of the first choice, if they were asked for."""
        return self.choices[0].logprobs
