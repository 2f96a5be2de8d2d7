"""`LLM(device="cuda")` without a GPU: from a checkpoint to text, on kernels that g++ built."""

from pathlib import Path

import numpy as np
import pytest

import npmoe
from tests.cli_fixtures import make_checkpoint
from tests.cuda.build import missing
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
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
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
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
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


def test_ranges_need_a_gpu(folder: Path) -> None:
    with pytest.raises(ValueError, match="nvtx = True"):
        npmoe.LLM(folder, device="cpu", nvtx=True)
