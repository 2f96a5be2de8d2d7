"""Train the byte-level BPE tokenizer of the demonstration model and tokenise its corpus.

    python train_tokenizer.py --train train.txt --valid valid.txt --out hf --data data

Books are separated by two blank lines in the text files and by `<|endoftext|>` in the token
streams. The pre-tokenizer is the regular expression of Qwen2/Qwen3; every byte is a token, so any
text can be encoded and decoded without loss.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 6144
END, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_books(path: Path) -> list[str]:
    """The books of a corpus file, without the blank lines between them."""
    return [book.strip("\n") + "\n" for book in path.read_text("utf-8").split("\n\n\n")]


def train(books: list[str]) -> Tokenizer:
    """Byte-level BPE over all books; specials take ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(books, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, books: list[str]) -> np.ndarray:
    """One stream, uint16 [tokens]: `<|endoftext|>` before the first book and after each one."""
    end = tokenizer.token_to_id(END)
    stream = [end]
    for book in books:
        stream += tokenizer.encode(book).ids
        stream.append(end)
    return np.array(stream, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--valid", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the tokenizer files")
    parser.add_argument("--data", type=Path, required=True, help="folder for the token streams")
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.data.mkdir(parents=True, exist_ok=True)

    train_books, valid_books = read_books(args.train), read_books(args.valid)
    tokenizer = train(train_books)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "unk_token": None,
        "additional_special_tokens": [USER, ASSISTANT],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": args.context,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

    sizes = {"train": args.train.stat().st_size, "valid": args.valid.stat().st_size}
    (args.data / "bytes.json").write_text(json.dumps(sizes) + "\n")
    for name, books in (("train", train_books), ("valid", valid_books)):
        stream, size = encode(tokenizer, books), sizes[name]
        np.save(args.data / f"{name}.npy", stream)
        print(f"{name}: {len(stream)} tokens, {size} bytes, {size / len(stream):.3f} bytes/token")
    for book in valid_books:
        assert tokenizer.decode(tokenizer.encode(book).ids) == book


if __name__ == "__main__":
    main()
