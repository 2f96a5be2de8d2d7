"""Text <-> ids, streaming decode, chat templates; bad files and hostile templates."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, normalizers, processors

from npmoe.errors import PromptError, TokenizerError
from npmoe.tokenizer import StreamDecoder, Tokenizer

GOLDEN = Path(__file__).parent / "golden" / "tokenizer"
EXPECTED = json.loads((GOLDEN / "golden.json").read_text(encoding="utf-8"))
BYTE_LEVEL = Tokenizer(GOLDEN)
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the golden tokenizer to be changed."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / name, tmp_path)
    return tmp_path


def configure(folder: Path, **changes: Any) -> Tokenizer:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), encoding="utf-8")
    return Tokenizer(folder)


def with_template(folder: Path, template: str) -> Tokenizer:
    return configure(folder, chat_template=template)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer as converted from sentencepiece: "▁" for spaces, a dummy space in front, bytes
    for unknown characters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁hello", "▁world", "h", "e", "l", "o", "w", "r", "d", "!", "é", "▁▁"]
    backend = HFTokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    return Tokenizer(folder)


def streamed(
    tokenizer: Tokenizer, ids: list[int], context: list[int], skip: bool
) -> tuple[str, list[str]]:
    """What the pieces should add up to, and the pieces."""
    decoder = StreamDecoder(tokenizer, context, skip)
    pieces = [*map(decoder.push, ids), decoder.flush()]
    before, full = tokenizer.decode(context, skip), tokenizer.decode(context + ids, skip)
    return full[len(os.path.commonprefix([before, full])) :], pieces  # noqa: RUF071


@pytest.mark.parametrize("case", EXPECTED["encoded"], ids=lambda case: case["text"][:20])
def test_golden_encodings(case: dict[str, Any]) -> None:
    assert BYTE_LEVEL.encode(case["text"]) == case["ids"]
    assert BYTE_LEVEL.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_golden_chat() -> None:
    ids = BYTE_LEVEL.apply_chat_template(EXPECTED["messages"])
    assert BYTE_LEVEL.decode(ids, skip_special_tokens=False) == EXPECTED["chat"]
    assert ids[:1] == [BYTE_LEVEL.token_id("<s>")]
    assert ids[1] != ids[0]


TEXTS = [
    "Grüße, 東京! 🙂🙃 end",
    "👩‍👩‍👧‍👦 family",
    "naïve café",
    "\ufffd literal",
    "  spaces  \n\n",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_stream_equals_full_decode_at_every_split(text: str, skip: bool) -> None:
    ids = BYTE_LEVEL.encode(text + "</s>tail")
    for split in range(len(ids) + 1):
        want, pieces = streamed(BYTE_LEVEL, ids[split:], ids[:split], skip)
        assert "".join(pieces) == want
    assert "".join(streamed(BYTE_LEVEL, ids, [], skip)[1]) == BYTE_LEVEL.decode(ids, skip)


def test_pieces_come_as_soon_as_a_character_is_whole() -> None:
    ids = BYTE_LEVEL.encode("a🙂b")
    decoder = StreamDecoder(BYTE_LEVEL)
    pieces = [decoder.push(i) for i in ids]
    assert pieces == ["a", "", "", "", "🙂", "b"]
    assert decoder.flush() == ""


def test_a_cut_character_is_given_by_flush() -> None:
    ids = BYTE_LEVEL.encode("a🙂")[:-1]
    decoder = StreamDecoder(BYTE_LEVEL)
    assert [decoder.push(i) for i in ids] == ["a", "", "", ""]
    assert decoder.flush() == "\ufffd"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 299), max_size=24),
    st.lists(st.integers(0, 299), max_size=24),
    st.booleans(),
)
def test_stream_of_random_bytes(ids: list[int], context: list[int], skip: bool) -> None:
    """Random ids are mostly invalid UTF-8; specials are among them."""
    want, pieces = streamed(BYTE_LEVEL, ids, context, skip)
    assert "".join(pieces) == want


SP_IDS = st.lists(
    st.sampled_from([*range(3), *range(259, 272), *(3 + b for b in "é€🙂 A".encode())]), max_size=16
)


@settings(max_examples=400, deadline=None)
@given(ids=SP_IDS, context=SP_IDS, skip=st.booleans())
def test_stream_of_sentencepiece_tokens(
    sentencepiece: Tokenizer, ids: list[int], context: list[int], skip: bool
) -> None:
    want, pieces = streamed(sentencepiece, ids, context, skip)
    assert "".join(pieces) == want


def test_sentencepiece_spaces(sentencepiece: Tokenizer) -> None:
    hello, world, space = (sentencepiece.token_id(t) for t in ("▁hello", "▁world", "▁"))
    assert hello is not None
    assert world is not None
    assert space is not None
    assert streamed(sentencepiece, [hello, world], [], True)[1] == ["hello", " world", ""]
    assert streamed(sentencepiece, [world, space, world], [hello], True)[1][0] == " world"
    assert "".join(streamed(sentencepiece, [hello, space, world], [], True)[1]) == "hello  world"


def test_a_run_of_byte_tokens_that_began_long_before(sentencepiece: Tokenizer) -> None:
    """The prompt ends in more byte tokens than the decoder's context; they go on."""
    ids = [3 + b for b in "€🙂€€🙂".encode()]
    o = sentencepiece.token_id("o")
    assert o is not None
    for split in range(0, len(ids) + 1):
        want, pieces = streamed(sentencepiece, [*ids[split:], o], [o, *ids[:split]], True)
        assert "".join(pieces) == want


@pytest.mark.parametrize(
    ("wanted", "adds_itself", "has_bos"),
    [
        *[(True, True, True), (True, False, True), (False, True, False), (False, False, False)],
        *[(None, True, True), (None, False, False)],
    ],
)
def test_add_bos_token(folder: Path, wanted: bool | None, adds_itself: bool, has_bos: bool) -> None:
    if adds_itself:
        backend = HFTokenizer.from_file(str(folder / "tokenizer.json"))
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
        backend.save(str(folder / "tokenizer.json"))
    tokenizer = configure(folder, **({} if wanted is None else {"add_bos_token": wanted}))
    plain = BYTE_LEVEL.encode("The router")
    assert tokenizer.encode("The router") == [0] * has_bos + plain
    assert tokenizer.encode("The router", add_special_tokens=False) == plain
    assert tokenizer.encode("") == [0] * has_bos
    # A template writes BOS itself and gets no second one.
    assert tokenizer.apply_chat_template(USER)[:2] != [0, 0]


def test_templates_by_name_and_in_a_file(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokenizer = configure(folder, chat_template=named)
    assert tokenizer.decode(tokenizer.apply_chat_template(USER)) == "D"
    (folder / "chat_template.jinja").write_text("J{{ bos_token }}")
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.apply_chat_template(USER), False) == "J<s>"


def test_what_templates_may_use(folder: Path) -> None:
    template = (
        "{% if tools is not none or documents is not none %}never{% endif %}"
        "{% for m in messages %}{% if m.role == 'x' %}{% break %}{% endif %}"
        "{{ m | tojson(indent=None) }}{{ {'a': 'ü'} | tojson(ensure_ascii=False) }}{% endfor %}"
        "{{ strftime_now('%Y')[:2] }}"
    )
    tokenizer = with_template(folder, template)
    text = tokenizer.decode(tokenizer.apply_chat_template([*USER, {"role": "x"}]))
    assert text == '{"role": "user", "content": "hi"}{"a": "ü"}20'


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'content': 'x'}) }}",
        "{{ messages.clear() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) | list }}",
        "{{ nothing.at.all }}",
        "{{ 'a' + 1 }}",
        "{% for m in messages %}",
        "{{ strftime_now(5) }}",
    ],
)
def test_a_template_that_misbehaves_is_an_error(folder: Path, template: str) -> None:
    messages = [dict(m) for m in USER]
    with pytest.raises(TokenizerError, match="chat template"):
        with_template(folder, template).apply_chat_template(messages)
    assert messages == USER


def test_a_template_reports_its_own_refusal(folder: Path) -> None:
    with pytest.raises(TokenizerError, match="roles must alternate"):
        with_template(folder, "{{ raise_exception('roles must alternate') }}").apply_chat_template(
            USER
        )


@pytest.mark.parametrize(
    "messages", ["hi", [["user", "hi"]], [{"content": "hi"}], ["hi"], [], None]
)
def test_messages_of_another_shape(messages: Any) -> None:
    with pytest.raises(PromptError, match="messages"):
        BYTE_LEVEL.apply_chat_template(messages)


def test_no_template(folder: Path) -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        configure(folder, chat_template=None).apply_chat_template(USER)
    with pytest.raises(TokenizerError, match="no chat template"):
        configure(folder, chat_template=[{"name": "rag", "template": "R"}]).apply_chat_template(
            USER
        )


def test_a_template_that_is_no_text(folder: Path) -> None:
    with pytest.raises(TokenizerError, match="chat_template"):
        configure(folder, chat_template={"default": "D"})
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        Tokenizer(folder)


def test_a_missing_special_token_is_named(folder: Path) -> None:
    with pytest.raises(TokenizerError, match=r"eos_token '<\|end\|>'"):
        configure(folder, eos_token={"content": "<|end|>"})


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"model": 5}', b"\xff\xfe"])
def test_a_corrupt_tokenizer_is_named(folder: Path, raw: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(raw)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.find(folder)


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff\xfe"])
def test_a_corrupt_tokenizer_config_is_named(folder: Path, raw: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(raw)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer.find(folder)


def test_another_kind_of_tokenizer_is_named(tmp_path: Path) -> None:
    assert Tokenizer.find(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model but no tokenizer\.json"):
        Tokenizer.find(tmp_path)


def test_without_a_config_nothing_is_special(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer(folder)
    assert tokenizer.special_tokens == {}
    assert tokenizer.encode("The") == BYTE_LEVEL.encode("The")
