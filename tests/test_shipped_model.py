"""The model in weights/storyteller: its size, that it has learned English, how it samples."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from npmoe.llm import LLM, shipped_model
from npmoe.sampling import SamplingParams

HELD_OUT = (
    "Long, long ago there stood in the midst of a country covered with lakes a vast stretch of "
    "moorland called the Tontlawald, on which no man ever dared set foot. From time to time a few "
    "bold spirits had been drawn by curiosity to its borders, and on their return had reported "
    "that they had caught a glimpse of a ruined house in a grove of thick trees, and round about "
    "it were a crowd of beings resembling men, swarming over the grass like bees."
)
"""From The Violet Fairy Book (1901), which the model was not trained on."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", max_num_seqs=2, progress=False) as llm:
        yield llm


def test_the_folder_is_below_24_megabytes() -> None:
    sizes = {p.name: p.stat().st_size for p in Path(shipped_model()).iterdir()}
    assert sum(sizes.values()) < 24_000_000
    assert {"config.json", "generation_config.json", "chat_template.jinja"} <= set(sizes)
    assert {"tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= set(sizes)


def test_it_predicts_held_out_english(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = [llm.config.eos_token_ids[0], *llm.tokenizer.encode(HELD_OUT)]
    logits = np.asarray(llm.forward(ids[:-1]), np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    nats = -logprobs[np.arange(len(ids) - 1), ids[1:]].sum()
    assert nats / math.log(2) / len(HELD_OUT.encode()) < 1.4


def test_it_samples_by_its_own_settings(llm: LLM) -> None:
    resolved = SamplingParams().resolve(llm.generation_config)
    assert 0 < resolved.temperature <= 1
    params = SamplingParams(seed=1, max_tokens=40)
    first, again = (llm.generate("Once upon a time", params) for _ in range(2))
    assert first.token_ids == again.token_ids
    words = first.text.split()
    assert len(words) > 20
    assert max(map(len, words)) < 20


def test_it_chats_in_its_way(llm: LLM) -> None:
    reply = llm.chat(
        [{"role": "user", "content": "The fox looked at the moon."}],
        SamplingParams(seed=1, max_tokens=20),
    )
    assert reply.text.strip()
