"""The command line as a user meets it: text out, errors of one line, exit codes."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from npmoe import __version__, cli
from npmoe.config import KV_FORMATS
from npmoe.engine.runner import Runner
from npmoe.llm import LLM
from tests.cli_fixtures import make_checkpoint, write_json

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "npmoe"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint(tmp_path_factory.mktemp("cli") / "tiny"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint without a tokenizer."""
    return str(make_checkpoint(tmp_path_factory.mktemp("cli") / "bare", tokenizer=False))


class Terminal(io.StringIO):
    """Standard input that is a person."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what stands on standard input."""

    def set_input(text: str, terminal: bool = False) -> None:
        monkeypatch.setattr(sys, "stdin", Terminal(text) if terminal else io.StringIO(text))

    return set_input


def run(*args: object) -> int:
    return cli.main([str(a) for a in args])


def fails(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line of a command that ends with exit code 2 and prints nothing else."""
    assert run(*args) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("npmoe: context ")]
    assert out == ""
    assert len(lines) == 1, err
    assert lines[0].startswith("npmoe: error: ")
    assert "Traceback" not in err
    return lines[0]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


# generate


def test_generate_prints_the_completion(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "hello", "--model", model, "--max-tokens", 12) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    assert out.strip().isalpha()
    assert len(out) == 13
    assert "12 tokens" in err


def test_quiet(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "hello", "--model", model, "--max-tokens", 3, "--quiet") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("argument", [["-"], []])
def test_prompt_from_standard_input(
    model: str, argument: list, capsys: pytest.CaptureFixture[str], typed: Callable
) -> None:
    options = ("--model", model, "--max-tokens", 12, "--json")
    typed("two\nlines\n")
    assert run("generate", *argument, *options) == 0
    from_input = json.loads(capsys.readouterr().out)
    assert run("generate", "two\nlines", *options) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == from_input["token_ids"]


def test_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "hello", "--model", model, "--max-tokens", 5, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    with LLM(model, device="cpu", progress=False) as llm:
        assert llm.tokenizer is not None
        assert answer["prompt_token_ids"] == llm.tokenizer.encode("hello")
        assert answer["text"] == llm.tokenizer.decode(answer["token_ids"])
    assert answer["finish_reason"] == "length"
    timings = answer["timings"]
    assert set(timings) == {"time_to_first_token", "time_per_output_token", "total"}
    assert 0 < timings["time_to_first_token"] < timings["total"]


def test_sampling_options_arrive(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("generate", "hello", "--model", model, "--max-tokens", 16, "--json")
    drawn = []
    for seed in (1, 1, 2):
        assert run(*options, "--temperature", 2, "--seed", seed, "--top-p", 0.9) == 0
        drawn.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert drawn[0] == drawn[1] != drawn[2]
    assert run(*options) == 0
    greedy = json.loads(capsys.readouterr().out)
    assert run(*options, "--temperature", 2, "--top-k", 1) == 0
    assert json.loads(capsys.readouterr().out)["text"] == greedy["text"]
    text = greedy["text"]
    assert run(*options, "--stop", "XX", "--stop", text[4:6]) == 0
    stopped = json.loads(capsys.readouterr().out)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == text[: text.find(text[4:6])]


def test_formats_arrive(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Recorder(LLM):
        def __init__(self, path: Any = None, **options: Any) -> None:
            seen.update(options)
            super().__init__(path, **options)

    monkeypatch.setattr(cli, "LLM", Recorder)
    options = ("--kv-cache", "fp8,int4", "--weights", "experts=fp4,lm-head=fp8", "--device", "cpu")
    options += ("--max-seq-len", "99", "--model", model, "--max-tokens", "2")
    assert run("generate", "hello", *options) == 0
    assert (seen["kv_cache"].key_format, seen["kv_cache"].value_format) == ("fp8", "int4")
    assert seen["weights"] == {"experts": "fp4", "lm_head": "fp8"}
    assert (seen["device"], seen["max_seq_len"]) == ("cpu", 99)


def test_without_a_tokenizer(bare: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("generate", "--model", bare, "--max-tokens", 4)
    assert run(*options, "--prompt-ids", "1,2, 3") == 0
    ids = [int(word) for word in capsys.readouterr().out.split(",")]
    assert len(ids) == 4
    assert run(*options, "--prompt-ids", "1,2,3", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["token_ids"], answer["prompt_token_ids"]) == (ids, [1, 2, 3])
    assert "--prompt-ids" in fails(capsys, *options, "hello")


# chat


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each step computes."""
    counts: list[int] = []
    whole = Runner.run

    def counting(self: Runner, works: list, wants_all: list) -> list:
        counts.extend(work.count for work in works)
        return whole(self, works, wants_all)

    monkeypatch.setattr(Runner, "run", counting)
    return counts


def test_chat_keeps_the_conversation_and_its_cache(
    model: str, computed: list[int], capsys: pytest.CaptureFixture[str], typed: Callable
) -> None:
    typed("first question\n\nsecond\n")
    assert run("chat", "--model", model, "--max-tokens", 20, "--system", "be brief", "--quiet") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.isalpha()
    assert second.isalpha()
    prompts = [
        [("system", "be brief"), ("user", "first question")],
        [("system", "be brief"), ("user", "first question"), ("assistant", first)],
    ]
    prompts[1].append(("user", "second"))
    with LLM(model, device="cpu", progress=False) as llm:
        assert llm.tokenizer is not None
        lengths = [
            len(llm.tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in prompt]))
            for prompt in prompts
        ]
    chunks = [count for count in computed if count > 1]
    assert chunks[0] == lengths[0]
    # The answer's last token was never run, and pages of 16 tokens are found whole.
    found = (lengths[0] + 20 - 1) // 16 * 16
    assert chunks[1] == lengths[1] - found
    assert len(computed) == 2 * 20


def test_chat_commands(model: str, capsys: pytest.CaptureFixture[str], typed: Callable) -> None:
    typed("one\n/reset\none\n/exit\nnever read\n")
    assert run("chat", "--model", model, "--max-tokens", 8) == 0
    out, err = capsys.readouterr()
    first, again = out.splitlines()
    assert first == again
    assert "new conversation" in err


def test_ctrl_c_stops_the_answer_only(
    model: str,
    capsys: pytest.CaptureFixture[str],
    typed: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, prompts = LLM.stream_chat, []

    def interrupted(self: LLM, messages: list, params: Any) -> Iterator[str]:
        prompts.append([m["content"] for m in messages])
        for i, piece in enumerate(whole(self, messages, params)):
            if i == 3 and len(prompts) == 1:
                raise KeyboardInterrupt
            yield piece

    monkeypatch.setattr(LLM, "stream_chat", interrupted)
    typed("one\ntwo\n")
    assert run("chat", "--model", model, "--max-tokens", 8) == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert "stopped" in err
    assert (len(first), len(second)) == (3, 8)
    assert prompts[1] == ["one", first, "two"]


def test_chat_at_a_terminal(
    model: str,
    capsys: pytest.CaptureFixture[str],
    typed: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C at the prompt drops the line; a message that is too long does not end the session."""
    lines = iter([KeyboardInterrupt, "x" * 300, "one", EOFError])

    def line(prompt: str) -> str:
        item = next(lines)
        if isinstance(item, str):
            return item
        raise item

    typed("", terminal=True)
    monkeypatch.setattr("builtins.input", line)
    assert run("chat", "--model", model, "--max-tokens", 8) == 0
    out, err = capsys.readouterr()
    assert "/reset starts over" in err
    assert len(out.split()) == 1


def test_chat_that_cannot_be(
    model: str, bare: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], typed: Callable
) -> None:
    plain = make_checkpoint(tmp_path / "plain", template=False)
    for folder in (plain, bare):
        assert "no chat template" in fails(capsys, "chat", "--model", folder)
    typed("x" * 300)
    assert "context" in fails(capsys, "chat", "--model", model, "--quiet")


# info and convert


def test_info(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", model) == 0
    text = capsys.readouterr().out
    for words in ("qwen3_moe: 2 layers", "experts: 4 in each of 1 layers, 2 a token", "141 GB"):
        assert words in text
    assert run("info", model, "--memory", 0.5) == 0
    text = capsys.readouterr().out
    assert "0.5 GB" in text
    assert "141 GB" not in text


def test_info_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", model, "--json", "--memory", 1) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model_type"] == "qwen3_moe"
    assert set(answer["kv_bytes"]) == set(KV_FORMATS)
    assert {fit["memory"] for fit in answer["fits"]} == {"1 GB"}


def test_info_needs_no_numba(model: str) -> None:
    code = (
        "import sys; from npmoe.cli import main; main(['info', sys.argv[1]]);"
        "sys.exit(bool({'numba', 'cupy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, model], env=environment(), check=False)
    assert done.returncode == 0


def test_convert(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new"
    options = ("--weights", "fp8", "--experts", "fp4", "--lm-head", "native")
    assert run("convert", model, target, *options) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "experts fp4, mlp fp8, lm_head bf16" in err
    assert run("generate", "hello", "--model", target, "--max-tokens", 6, "--json") == 0
    converted = json.loads(capsys.readouterr().out)
    weights = "experts=fp4,mlp=fp8,attention=fp8"
    run("generate", "hello", "--model", model, "--max-tokens", 6, "--json", "--weights", weights)
    assert json.loads(capsys.readouterr().out)["token_ids"] == converted["token_ids"]
    assert "exists already" in fails(capsys, "convert", model, target, "--weights", "fp4")
    assert "would lose twice" in fails(
        capsys, "convert", target, tmp_path / "newer", "--weights", "int8"
    )


# bad input


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("", "COMMAND"),
        ("dance", "invalid choice"),
        ("generate hi --nonsense", "unrecognized arguments"),
        ("generate hi --max-tokens many", "--max-tokens"),
        ("generate hi --max-tokens 0", "max_tokens"),
        ("generate hi --temperature -1", "temperature"),
        ("generate hi --temperature nan", "temperature"),
        ("generate hi --top-p 2", "(0, 1]"),
        ("generate hi --top-k -3", "top_k"),
        ("generate hi --seed -3", "seed"),
        ("generate hi --stop=", "stop"),
        ("generate --prompt-ids 1,x", "1,2,3"),
        ("generate hi --prompt-ids 1", "not both"),
        ("generate hi --model MODEL --kv-cache fp3", "kv_cache = 'fp3'"),
        ("generate hi --model MODEL --kv-cache fp8,fp8,fp8", "legal formats"),
        ("generate hi --model MODEL --weights fp3", "'fp3'"),
        ("generate hi --model MODEL --weights heads=fp4", "'heads'"),
        ("generate hi --model MODEL --device tpu", "'auto', 'cpu' and 'cuda'"),
        ("generate hi --model MODEL --max-seq-len 0", "max_seq_len"),
        ("generate hi --model MODEL --max-seq-len 9999", "max_position_embeddings"),
        ("generate --prompt-ids 9999 --model MODEL", "legal ids are 0 to 299"),
        ("generate hi --model /no/such/folder", "does not exist"),
        ("generate hi --model org/name", "Hugging Face cache"),
        ("generate hi --model model.gguf", "GGUF"),
        ("generate hi --model pytorch_model.bin", "pickle"),
        ("info /no/such/folder", "does not exist"),
        ("info MODEL --memory -1", "--memory"),
        ("convert MODEL TMP/new", "nothing to convert"),
        ("convert MODEL TMP/new --experts fp3", "'fp3'"),
        ("convert MODEL TMP/no/new --experts fp4", "create it first"),
        ("convert /no/such/folder TMP/new --experts fp4", "does not exist"),
    ],
)
def test_bad_arguments(
    args: str, words: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = args.replace("MODEL", model).replace("TMP", str(tmp_path)).split()
    assert words in fails(capsys, *split)
    assert list(tmp_path.iterdir()) == []


def test_bad_prompts(model: str, capsys: pytest.CaptureFixture[str], typed: Callable) -> None:
    options = ("generate", "--model", model)
    typed("", terminal=True)
    assert "standard input" in fails(capsys, *options)
    typed("\n")
    assert "empty" in fails(capsys, *options)
    assert "empty" in fails(capsys, *options, "")
    assert "UTF-8" in fails(capsys, *options, "\udcff")
    assert "the context takes" in fails(capsys, *options, "long " * 100)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def name_an_absent_shard(folder: Path) -> None:
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": "gone.safetensors"}})


def edit_config(**change: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", config | change)

    return edit


def name_a_missing_token(folder: Path) -> None:
    write_json(folder / "tokenizer_config.json", {"bos_token": "<absent>"})


def retype_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"BF17"', 1))


def add_a_tensor(folder: Path) -> None:
    save_file({"stray": np.zeros(3, np.float32)}, folder / "more.safetensors")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncate, "truncated"),
        (name_an_absent_shard, "gone.safetensors"),
        (retype_a_tensor, "'BF17'"),
        (edit_config(num_hidden_layers=3), "missing"),
        (add_a_tensor, "'stray' not used"),
        (edit_config(moe_intermediate_size=64), "has shape"),
        (edit_config(novel_key=1), "--ignore-config-key novel_key"),
        (edit_config(model_type="gpt2"), "'gpt2'"),
        (name_a_missing_token, "<absent>"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .safetensors"),
    ],
)
def test_bad_checkpoints(
    damage: Callable[[Path], None], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path / "damaged")
    damage(folder)
    assert words in fails(capsys, "generate", "hello", "--model", folder)
    if damage is not name_a_missing_token:
        assert words in fails(capsys, "info", folder)
        assert words in fails(capsys, "convert", folder, tmp_path / "new", "--weights", "fp8")


def test_an_ignored_config_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "novel", novel_key=1)
    ignore = ("--ignore-config-key", "novel_key")
    assert run("generate", "hi", "--model", folder, "--max-tokens", 2, *ignore) == 0
    assert run("info", folder, *ignore) == 0


def test_a_bug_keeps_its_traceback(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(cli, "print_pieces", broken)
    with pytest.raises(ValueError, match="broadcast"):
        run("generate", "hello", "--model", model)


# as a program


def test_version() -> None:
    done = subprocess.run(
        [*COMMAND, "--version"], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"npmoe {__version__}\n")


def test_exit_code_of_bad_input() -> None:
    done = subprocess.run(
        [*COMMAND, "info", "/no/such/folder"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "npmoe: error: /no/such/folder does not exist\n"


def test_a_reader_that_leaves(model: str) -> None:
    with subprocess.Popen(
        [*COMMAND, "generate", "hello", "--model", model, "--max-tokens", "200", "--quiet"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_ctrl_c() -> None:
    with subprocess.Popen(
        [*COMMAND, "generate"],
        env=environment(),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore Ctrl-C, and so would their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for its prompt
            process.wait(2)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert "Traceback" not in process.stderr.read()


def test_ctrl_c_while_the_program_is_imported(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise KeyboardInterrupt")  # the first import of cli.py
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = subprocess.run(
        [*COMMAND, "--version"],
        env=environment() | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def in_a_shell(command: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code and standard error of `npmoe arguments` followed by a redirection."""
    program = [*COMMAND, *arguments]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {command}', "sh", *program],
        env=environment() | variables,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["info"]], ids=str)
def test_a_full_disk(arguments: list[str], unbuffered: str) -> None:
    code, said = in_a_shell(">/dev/full", *arguments, PYTHONUNBUFFERED=unbuffered)
    assert (code, said) == (
        2,
        "npmoe: error: the output cannot be written: No space left on device\n",
    )


def test_a_full_disk_while_text_comes(model: str) -> None:
    options = ("--model", model, "--max-tokens", "5", "--quiet")
    code, said = in_a_shell(">/dev/full", "generate", "hello", *options)
    assert code == 2
    assert said.startswith("npmoe: error: the output cannot be written")
    assert said.count("\n") == 1


def test_closed_output() -> None:
    code, said = in_a_shell(">&-", "info")
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("npmoe: error: standard output is closed")


def test_closed_standard_error(model: str) -> None:
    """Messages and bars have nowhere to go, and do not go among the output."""
    options = ["generate", "hello", "--model", model, "--max-tokens", "5"]
    done = subprocess.run(
        ["sh", "-c", '"$@" 2>&-', "sh", *COMMAND, *options],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    assert "npmoe" not in done.stdout
