"""`npmoe eval` as a user meets it."""

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from npmoe import cli
from npmoe.config import KV_FORMATS
from npmoe.llm import LLM
from tests.cli_fixtures import make_checkpoint

TEXT = "once upon a time there was a word. " * 12
END, LAYERS = 257, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("eval") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(TEXT)
    return path


def run(*args: object) -> int:
    return cli.main([str(a) for a in args])


def evaluated(capsys: pytest.CaptureFixture[str], *args: object) -> dict[str, Any]:
    assert run("eval", *args, "--json", "--quiet") == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def nats_by_hand(model: Path, ids: list[int], kv_cache: str) -> list[float]:
    """-log p of each token after the first, from the logits of a window at a time."""
    with LLM(model, device="cpu", kv_cache=kv_cache, progress=False) as llm:
        nats = []
        for start in range(0, len(ids) - 1, 256):
            window, targets = ids[start : start + 256], ids[start + 1 : start + 257]
            logits = llm.forward(window[: len(targets)]).astype(np.float64)
            for row, target in zip(logits, targets, strict=True):
                nats.append(math.log(np.exp(row).sum()) - row[target])
    return nats


def test_losses_of_the_whole_text(
    model: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """420 letters, a line end and two end tokens: 422 predictions, in windows of 256 and 166."""
    record = evaluated(
        *(capsys, text, "--model", model, "--passkeys", 0),
        *("--kv-cache", "fp4", "--kv-cache", "fp8,int4", "--kv-cache", "bf16"),
    )
    with LLM(model, device="cpu", progress=False) as llm:
        assert llm.tokenizer is not None
        ids = [END, *llm.tokenizer.encode(TEXT + "\n", add_special_tokens=False), END]
    assert (record["tokens"], record["bytes"], record["window"]) == (422, len(TEXT), 256)
    assert [c["kv_cache"] for c in record["caches"]] == ["bf16", "fp4", "fp8,int4"]
    for cache in record["caches"]:
        nats = nats_by_hand(model, ids, cache["kv_cache"])
        overall = cache["overall"]
        assert overall["nats_per_token"] == pytest.approx(np.mean(nats), rel=1e-5)
        assert overall["perplexity"] == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)
        bits = sum(nats) / math.log(2) / len(TEXT)
        assert overall["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
        (bucket,) = cache["buckets"]
        assert (bucket["from"], bucket["to"], bucket["tokens"]) == (0, 256, 422)
        assert cache["passkey"] == []
    reference, rough, mixed = (c["overall"] for c in record["caches"])
    assert (reference["kl_nats"], reference["top1_agreement"]) == (0, 1)
    assert min(rough["kl_nats"], mixed["kl_nats"]) > 0


def test_bytes_per_token(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers of two heads of 32 elements, K and V: 256 numbers, and 8 scales of 2 bytes."""
    caches = evaluated(capsys, text, "--model", model, "--tokens", 20, "--passkeys", 0)["caches"]
    sizes = {c["kv_cache"]: c["bytes_per_token"] for c in caches}
    assert set(sizes) == set(KV_FORMATS)
    assert sizes["fp32"] == 4 * 256
    assert sizes["bf16"] == 2 * 256
    assert sizes["fp8"] == sizes["int8"] == 256 + 16
    assert sizes["fp4"] == sizes["int4"] == 128 + 16
    assert sizes["int4_asym"] == 128 + 24
    assert sizes["mxfp4"] == sizes["nvfp4"] == 128 + 8


def test_a_cache_with_windows(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first 128 tokens of a window see copies alone, whatever the format beside them."""
    options = (text, "--model", model, "--passkeys", 0, "--context", 200, "--tokens", 200)
    kinds = [a for k in ("int4", "int4:windows") for a in ("--kv-cache", k)]
    _, plain, windows = evaluated(capsys, *options, *kinds)["caches"]
    assert windows["bytes_per_token"] == plain["bytes_per_token"] == 144
    assert (plain["bytes_per_sequence"], windows["bytes_per_sequence"]) == (0, 656 * 512)
    assert 0 < windows["overall"]["kl_nats"] < plain["overall"]["kl_nats"] / 2
    early = evaluated(capsys, *options[:-1], 128, *kinds)["caches"]
    assert early[1]["overall"]["kl_nats"] > 1e-4
    assert early[2]["overall"]["kl_nats"] < 1e-9
    assert run("eval", *options, "--kv-cache", "fp4+", "--quiet") == 0
    assert "fp4+: and copies of 336 kB a sequence" in capsys.readouterr().out


def test_a_part_of_the_text(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = evaluated(
        *(capsys, text, "--model", model, "--kv-cache", "int8"),
        *("--context", 200, "--tokens", 250, "--passkeys", 2),
    )
    assert (record["tokens"], record["bytes"], record["window"]) == (250, 250, 200)
    for cache in record["caches"]:
        (key,) = cache["passkey"]
        assert (key["context"], key["trials"]) == (200, 2)
        assert 0 <= key["found"] <= key["digits"] <= 1


def test_a_table_and_a_plot(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "loss.svg"
    options = ("--kv-cache", "fp4", "--tokens", 100, "--passkeys", 1, "--plot", plot)
    assert run("eval", text, "--model", model, *options) == 0
    out, err = capsys.readouterr()
    assert f"wrote {plot}" in err
    lines = [line.split() for line in out.splitlines()]
    (row,) = (line for line in lines if line[:3] == ["bf16", "512", "all"])
    assert row[-2:] == ["0.00e+00", "100.00%"]
    (row,) = (line for line in lines if line[:3] == ["fp4", "144", "all"])
    assert float(row[-2]) > 0
    assert ["0-100"] in [line[:1] for line in lines]
    assert ["KV", "cache", "256"] in lines
    assert "tiny on words.txt: 100 tokens, 100 bytes, in windows of 256; weights native" in out
    texts = {t.text for t in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")}
    assert {"bf16", "fp4", "KV cache, bytes per token", "loss, nats per token"} <= texts


def test_weights(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (text, "--model", model, "--kv-cache", "bf16", "--tokens", 40, "--passkeys", 0)
    native = evaluated(capsys, *options)
    rough = evaluated(capsys, *options, "--weights", "experts=fp4")
    assert (native["weights"], rough["weights"]) == ("native", {"experts": "fp4"})
    assert native["caches"][0]["overall"] != rough["caches"][0]["overall"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("eval", "TEXT"),
        ("eval TMP/absent.txt --model MODEL", "absent.txt cannot be read: No such file"),
        ("eval TMP --model MODEL", "cannot be read"),
        ("eval TMP/empty.txt --model MODEL", "empty.txt is empty"),
        ("eval TMP/latin.txt --model MODEL", "latin.txt is not UTF-8"),
        ("eval TEXT --model MODEL --kv-cache fp3", "kv_cache = 'fp3'"),
        ("eval TEXT --model MODEL --kv-cache fp8 --kv-cache a,b", "kv_cache = 'a'"),
        ("eval TEXT --model MODEL --weights fp3", "'fp3'"),
        ("eval TEXT --model MODEL --context 257", "max_position_embeddings is 256"),
        ("eval TEXT --model MODEL --context 0", "context = 0"),
        ("eval TEXT --model MODEL --tokens 0", "tokens = 0"),
        ("eval TEXT --model MODEL --passkeys -1", "trials = -1"),
        ("eval TEXT --model MODEL --device tpu", "'auto', 'cpu' and 'cuda'"),
        ("eval TEXT --model MODEL --plot TMP/plot.png", ".svg"),
        ("eval TEXT --model MODEL --plot TMP/no/plot.svg", "create it first"),
        ("eval TEXT --model BARE", "no tokenizer.json"),
        ("eval TEXT --model NARROW --kv-cache fp4", "head_dim = 16"),
        ("eval TEXT --model /no/such/folder", "does not exist"),
    ],
)
def test_bad_input(
    args: str, words: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words.txt").write_text(TEXT)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    if "BARE" in args:
        make_checkpoint(tmp_path / "bare", tokenizer=False)
    if "NARROW" in args:
        make_checkpoint(tmp_path / "narrow", head_dim=16)
    places = {"TEXT": "TMP/words.txt", "BARE": "TMP/bare", "NARROW": "TMP/narrow", "MODEL": model}
    for name, place in places.items():
        args = args.replace(name, str(place))
    assert run(*args.replace("TMP", str(tmp_path)).split()) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith("npmoe: error: ")
    assert words in line
