"""Text <-> token ids by a checkpoint's tokenizer.json, its chat template, and streaming decode."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _Tokenizer

from npmoe.errors import PromptError, TokenizerError

Message = dict[str, Any]
REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8


class Tokenizer:
    """A tokenizer.json with what tokenizer_config.json says of it."""

    def __init__(self, folder: Path) -> None:
        """Raises TokenizerError if a file cannot be read or names a token that is not there."""
        self.folder = folder
        try:
            self._tokenizer = _Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise TokenizerError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = _read_config(folder / "tokenizer_config.json")
        self.special_tokens = self._special_tokens()
        self._chat_template = self._find_template()
        self._byte_ids = self._find_byte_tokens()

    @classmethod
    def find(cls, folder: Path) -> "Tokenizer | None":
        """The folder's tokenizer, or None if it has no tokenizer.json.

        Raises TokenizerError where there is another kind of tokenizer only.
        """
        if (folder / "tokenizer.json").is_file():
            return cls(folder)
        for other in ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model"):
            if (folder / other).is_file():
                raise TokenizerError(
                    f"{folder} has {other} but no tokenizer.json, the only format that is read; "
                    "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes "
                    "one. Without a tokenizer, remove the file and pass token ids."
                )
        return None

    def _special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and so on, as the chat template sees them."""
        found = {}
        for name, value in self.config.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                if self.token_id(text) is None:
                    raise TokenizerError(
                        f"{self.folder}: tokenizer_config.json names {name} {text!r}, which "
                        "tokenizer.json does not have"
                    )
                found[name] = text
        return found

    def _find_template(self) -> str | None:
        path = self.folder / "chat_template.jinja"
        if path.is_file():
            return _read_text(path)
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several named templates
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            raise TokenizerError(f"{self.folder}: chat_template is no text: {template!r:.80}")
        return template

    def _find_byte_tokens(self) -> frozenset[int]:
        """Tokens such as <0xE2> of a vocabulary that spells unknown characters in bytes."""
        letter = self.token_id("<0x41>")
        if letter is None or self.decode([letter]) != "A":
            return frozenset()
        ids = (self.token_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    def is_byte(self, token_id: int) -> bool:
        """Whether a token stands for one byte, whose text depends on the bytes around it."""
        return token_id in self._byte_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return self._chat_template is not None

    @property
    def vocab_size(self) -> int:
        """Token ids that the tokenizer can produce, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token's exact text, or None."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of raw text; special tokens such as BOS are added as the checkpoint asks.

        Raises PromptError for text with a lone surrogate, which has no UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is not UTF-8 text: {error}") from None
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        bos, wanted = self.special_tokens.get("bos_token"), self.config.get("add_bos_token")
        if add_special_tokens and bos is not None and wanted is not None:
            bos_id = self.token_id(bos)
            assert bos_id is not None
            starts = ids[:1] == [bos_id]
            if wanted and not starts:
                ids = [bos_id, *ids]
            elif starts and not wanted and not text.startswith(bos):
                ids = ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation: a list of {"role": ..., "content": ...}.

        The template runs in Jinja's sandbox and writes its own special tokens.
        Raises TokenizerError if there is none, or with the message of one that refuses, and
        PromptError for messages of another shape.
        """
        if self._chat_template is None:
            raise TokenizerError(
                f"{self.folder} has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); use generate with raw text"
            )
        shaped = isinstance(messages, Sequence) and all(
            isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages
        )
        if not shaped or not messages:
            raise PromptError('messages: expected a list of {"role": ..., "content": ...}')
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
        try:
            text = environment.from_string(self._chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, "documents": None, **self.special_tokens, **variables},
            )
        except Exception as error:  # a template can raise anything
            raise TokenizerError(f"{self.folder}: the chat template fails: {error}") from None
        return self.encode(text, add_special_tokens=False)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(_read_text(path))
    except ValueError as error:
        raise TokenizerError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return config


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)


class StreamDecoder:
    """Turns tokens into text piece by piece; the pieces joined are what the tokens add to the text.

    A piece is held back while it may end inside a character. `context` are tokens before the
    first one: they decide about a leading space and are not part of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = self._last_of(context)
        self._start, self._read = 0, len(self._ids)
        self._in_bytes = bool(self._ids) and tokenizer.is_byte(self._ids[-1])

    def _last_of(self, context: Sequence[int]) -> list[int]:
        """Enough of the context's end to have text and not to begin inside a character."""
        size = CONTEXT_TOKENS
        while size < len(context):
            text = self._tokenizer.decode(context[-size:], self._skip)
            if text and not text.startswith(REPLACEMENT):
                break
            size *= 2
        return list(context[-size:])

    def push(self, token_id: int) -> str:
        """The text that this token completes; often empty for a token of a few bytes."""
        self._ids.append(token_id)
        if self._tokenizer.is_byte(token_id):
            self._in_bytes = True  # a run of bytes is decoded as a whole
        elif self._in_bytes:
            self._in_bytes = not self._tokenizer.decode([token_id], self._skip)
        if self._in_bytes:
            return ""
        piece = self._pending()
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return piece

    def flush(self) -> str:
        """What is still held back, at the end."""
        piece = self._pending()
        self._start = self._read = len(self._ids)
        return piece

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._read], self._skip)
        now = self._tokenizer.decode(self._ids[self._start :], self._skip)
        if not now.startswith(before):  # the context ended inside a character
            same = (a == b for a, b in zip(before, now, strict=False))
            before = before[: next((i for i, equal in enumerate(same) if not equal), len(now))]
        return now[len(before) :]
