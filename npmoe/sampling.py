"""`SamplingParams`: how tokens are chosen and when a completion ends."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

DEFAULT_MAX_TOKENS = 256
MAX_LOGPROBS = 100


@dataclass(frozen=True)
class SamplingParams:
    """What the caller wants of one request. A field left at None comes from the checkpoint's
    `generation_config.json`; where that is silent, decoding is greedy and filters are off.

    n: completions of the same prompt.
    temperature: 0 is greedy; logits are divided by it. top_k: keep the k best tokens, 0 = all.
    top_p: keep the smallest set whose probability reaches top_p (Holtzman et al., 2020).
    min_p: keep tokens of at least min_p times the best one's probability (Nguyen et al., 2024).
    Filters apply in the order temperature, top_k, top_p, min_p.
    repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or
    completion (Keskar et al., 2019). presence_penalty and frequency_penalty are subtracted once
    and per occurrence, for tokens of the completion.
    seed: the same seed gives the same tokens at any batch size; None draws one.
    max_tokens: None takes generation_config's max_new_tokens, else 256.
    min_tokens: no end token, stop token or stop string counts before that many.
    stop: strings that end the completion and are left out of its text.
    stop_token_ids: tokens that end it, besides the checkpoint's own end tokens.
    logit_bias: token id -> value added to its logit.
    logprobs: None, or how many alternatives to report beside each token's log probability;
    log probabilities are of the model's own distribution, before penalties and temperature.
    prompt_logprobs: the same for the tokens of the prompt.
    ignore_eos: end tokens do not end it. skip_special_tokens: leave them out of the text.

    Raises ValueError with the field's name and legal range.
    """

    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _whole("n", self.n, 1, 1024)
        _real("temperature", self.temperature, 0, math.inf)
        _whole("top_k", self.top_k, 0, None)
        _real("top_p", self.top_p, 0, 1, open_low=True)
        _real("min_p", self.min_p, 0, 1)
        _real("repetition_penalty", self.repetition_penalty, 0, math.inf, open_low=True)
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        _whole("seed", self.seed, 0, 2**64 - 1)
        _whole("max_tokens", self.max_tokens, 1, None)
        _whole("min_tokens", self.min_tokens, 0, None)
        _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop = {self.stop!r}: expected non-empty strings")
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, None)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias (token id)", token, 0, None)
            _real("logit_bias", bias, -100, 100)
        if self.min_tokens is not None and self.max_tokens is not None:
            _whole("min_tokens", self.min_tokens, 0, self.max_tokens)

    def resolve(self, generation_config: Mapping[str, Any]) -> "SamplingParams":
        """Fills the fields left at None from a generation_config, then with neutral values."""

        def pick(name: str, theirs: str, neutral: Any) -> Any:
            value = getattr(self, name)
            if value is None:
                value = generation_config.get(theirs)
            return neutral if value is None else value

        samples = generation_config.get("do_sample")
        neutral_temperature = 1.0 if samples else 0.0
        temperature = pick("temperature", "temperature", neutral_temperature)
        if self.temperature is None and samples is False:
            temperature = 0.0
        max_tokens = pick("max_tokens", "max_new_tokens", DEFAULT_MAX_TOKENS)
        return replace(
            self,
            temperature=float(temperature),
            top_k=pick("top_k", "top_k", 0),
            top_p=pick("top_p", "top_p", 1.0),
            min_p=pick("min_p", "min_p", 0.0),
            repetition_penalty=pick("repetition_penalty", "repetition_penalty", 1.0),
            max_tokens=max_tokens,
            min_tokens=min(pick("min_tokens", "min_new_tokens", 0), max_tokens),
        )


def _whole(name: str, value: Any, least: int, most: int | None) -> None:
    if value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        legal = f">= {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} = {value!r}: legal values are whole numbers {legal}")


def _real(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    inside = number and (low < value if open_low else low <= value) and value <= high
    if not inside or not math.isfinite(value):
        left = "(" if open_low else "["
        right = f"{high:g}]" if math.isfinite(high) else "infinity)"
        raise ValueError(f"{name} = {value!r}: legal range is {left}{low:g}, {right}")
