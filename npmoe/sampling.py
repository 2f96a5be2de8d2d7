"""`SamplingParams`: how tokens are chosen and when a completion ends."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
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
    max_tokens: None takes generation_config's max_new_tokens, else 256; at least min_tokens.
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
        self._check("n", _whole, 1, 1024, optional=False)
        self._check("temperature", _real, 0, math.inf)
        self._check("top_k", _whole, 0, None)
        self._check("top_p", _real, 0, 1, open_low=True)
        self._check("min_p", _real, 0, 1)
        self._check("repetition_penalty", _real, 0, math.inf, open_low=True)
        self._check("presence_penalty", _real, -2, 2, optional=False)
        self._check("frequency_penalty", _real, -2, 2, optional=False)
        self._check("seed", _whole, 0, 2**64 - 1)
        self._check("max_tokens", _whole, 1, None)
        self._check("min_tokens", _whole, 0, self.max_tokens)
        self._check("logprobs", _whole, 0, MAX_LOGPROBS)
        self._check("prompt_logprobs", _whole, 0, MAX_LOGPROBS)
        self._check("ignore_eos", _yes_or_no, optional=False)
        self._check("skip_special_tokens", _yes_or_no, optional=False)
        stop = (
            (self.stop,)
            if isinstance(self.stop, str)
            else _items("stop", self.stop, "non-empty strings")
        )
        if any(not isinstance(s, str) or not s for s in stop):
            raise ValueError(f"stop = {self.stop!r}: expected non-empty strings")
        ids = _items("stop_token_ids", self.stop_token_ids, "token ids")
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias = {self.logit_bias!r}: expected a dict, token id -> bias")
        biases = {
            _whole("logit_bias (token id)", token, 0, None): _real("logit_bias", bias, -100, 100)
            for token, bias in self.logit_bias.items()
        }
        object.__setattr__(self, "stop", stop)
        object.__setattr__(
            self, "stop_token_ids", tuple(_whole("stop_token_ids", i, 0, None) for i in ids)
        )
        object.__setattr__(self, "logit_bias", biases)

    def _check(
        self, name: str, check: Callable, *legal: Any, optional: bool = True, **options: Any
    ) -> None:
        """Replaces a field by its checked value; NumPy scalars become Python numbers."""
        value = getattr(self, name)
        if value is not None or not optional:
            object.__setattr__(self, name, check(name, value, *legal, **options))

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
        if self.max_tokens is None:
            max_tokens = max(max_tokens, self.min_tokens or 0)
        return replace(
            self,
            temperature=temperature,
            top_k=pick("top_k", "top_k", 0),
            top_p=pick("top_p", "top_p", 1.0),
            min_p=pick("min_p", "min_p", 0.0),
            repetition_penalty=pick("repetition_penalty", "repetition_penalty", 1.0),
            max_tokens=max_tokens,
            min_tokens=min(pick("min_tokens", "min_new_tokens", 0), max_tokens),
        )


def _whole(name: str, value: Any, least: int, most: int | None) -> int:
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        legal = f">= {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name} = {value!r}: legal values are whole numbers {legal}")
    return int(value)


def _real(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    number = isinstance(value, Real) and not isinstance(value, bool)
    inside = number and (low < value if open_low else low <= value) and value <= high
    if not inside or not math.isfinite(value):
        left = "(" if open_low else "["
        right = f"{high:g}]" if math.isfinite(high) else "infinity)"
        raise ValueError(f"{name} = {value!r}: legal range is {left}{low:g}, {right}")
    return float(value)


def _yes_or_no(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r}: legal values are True and False")
    return value


def _items(name: str, value: Any, of: str) -> tuple:
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} = {value!r}: expected a list of {of}")
    return tuple(value)
