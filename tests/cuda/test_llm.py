"""`LLM(device="cuda")` without a GPU: from a checkpoint to text, on kernels that g++ built."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import npmoe
from npmoe.bench import check
from npmoe.bench.shapes import SHAPES
from npmoe.config import KVCacheConfig
from npmoe.errors import NumericalError
from npmoe.models import decode
from tests.cli_fixtures import make_checkpoint
from tests.cuda.fake_gpu import fake_gpu
from tests.helpers import GOLDEN

GREEDY = npmoe.SamplingParams(temperature=0, max_tokens=3)
OPTIONS = {"max_seq_len": 32, "kv_cache": "fp4", "progress": False}
SIZES = {
    "hidden_size": 128,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpu") / "tiny", **SIZES)


@pytest.mark.parametrize("nvtx", [False, True])
@pytest.mark.parametrize("check_finite", [False, True])
def test_the_text_of_the_cpu_under_ranges_or_not(
    nvtx: bool, check_finite: bool, folder: Path
) -> None:
    """And under checks of keys and values or not."""
    with npmoe.LLM(folder, device="cpu", **OPTIONS) as cpu:
        expected = cpu.generate([5, 6], GREEDY).token_ids
    options = {"nvtx": nvtx, "check_finite": check_finite, **OPTIONS}
    with fake_gpu() as gpu, npmoe.LLM(folder, device="cuda", **options) as llm:
        assert llm.generate([5, 6], GREEDY).token_ids == expected
        assert gpu.launched[-1] == "lm_head_bf16"
        without_graphs = nvtx or check_finite
        assert gpu.ranges[-1] == (("step", "lm_head_bf16") if without_graphs else ())


def test_gpt_oss() -> None:
    """Biases everywhere, sinks, windows shorter than the prompt, clamped SwiGLU, MXFP4 experts, and
    widths that fill a part of the kernels' columns."""
    options = {"max_seq_len": 64, "kv_cache": "bf16", "progress": False}
    params = npmoe.SamplingParams(temperature=0, max_tokens=4, logprobs=1)
    prompt = np.random.default_rng(1).integers(0, 128, 30).tolist()
    found = []
    for device in ("cpu", "cuda"):
        with fake_gpu() as gpu, npmoe.LLM(GOLDEN / "gpt_oss", device=device, **options) as llm:
            found.append(llm.generate(prompt, params))
    cpu, cuda = found
    assert cuda.token_ids == cpu.token_ids
    expected = [t.logprob for t in cpu.logprobs]
    assert [t.logprob for t in cuda.logprobs] == pytest.approx(expected, abs=2e-3)
    assert "gate_up_mxfp4" in gpu.launched


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_what_belongs_to_a_request_is_checked(
    device: str, folder: Path, tmp_path: Path
) -> None:
    """The embedding of token 0, which first runs and unused rows take, is infinite."""
    broken = shutil.copytree(folder, tmp_path / "broken")
    path = broken / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][0] = np.inf
    save_file(tensors, path)
    options = {"max_num_seqs": 4, "check_finite": True, **OPTIONS}
    with fake_gpu(), npmoe.LLM(broken, device=device, **options) as llm:
        params = npmoe.SamplingParams(temperature=0, max_tokens=2, logit_bias={0: -100.0})
        assert len(llm.generate([[5, 6], [7], [8, 9, 10]], params)) == 3
        with pytest.raises(NumericalError, match="layer 0: a key or value of position 1 is NaN"):
            llm.generate([5, 0, 6], GREEDY)


@pytest.mark.parametrize("ignored", [False, True])
def test_the_check_of_the_bench_notices_a_window_that_is_ignored(ignored: bool) -> None:
    raw = SHAPES["mixtral-8x7b"] | {"sliding_window": 4096}

    with fake_gpu(), patch.object(check, "STEPS", 3):
        original = decode.kernel

        def kernel(stem: str, name: str, **macros: int) -> Any:
            return original(stem, name, **macros | ({"WINDOWED": 0} if ignored else {}))

        with patch.object(decode, "kernel", kernel):
            if not ignored:
                assert check.tokens_checked(raw, {}, KVCacheConfig(), 1).equal == 3
                return
            with pytest.raises(check.WrongTokens, match="step 0, sequence 0"):
                check.tokens_checked(raw, {}, KVCacheConfig(), 1)


def test_ranges_need_a_gpu(folder: Path) -> None:
    with pytest.raises(ValueError, match="nvtx = True"):
        npmoe.LLM(folder, device="cpu", nvtx=True)
