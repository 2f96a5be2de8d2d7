"""Write quantized.npz: logits of checkpoints that tests/quantized_files.py packs, by transformers.

Usage, from the root: python -m tests.golden.make_quantized
Needs torch 2.13.0, transformers 5.24.0, accelerate and compressed-tensors 0.20.1, which decompress
integers in the type of their scales: only cases with float32 ones are compared.

Case name -> logits float32 [40, vocab] of the first 40 tokens of the qwen3 case.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config

from tests.quantized_files import CASES, GOLDEN_CASES, make_quantized

HERE = Path(__file__).parent


def logits_of(folder: Path) -> np.ndarray:
    """Logits of a quantised checkpoint, decompressed and in float32."""
    with np.load(HERE / "qwen3" / "golden.npz") as golden:
        ids = torch.from_numpy(golden["input_ids"][:40]).long()
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    if stated["quant_method"] == "fp8":
        how = FineGrainedFP8Config(
            dequantize=True,
            weight_block_size=tuple(stated["weight_block_size"]),
            modules_to_not_convert=stated["modules_to_not_convert"],
        )
    else:
        how = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=how,
    ).eval()
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0].float().numpy()


if __name__ == "__main__":
    found = {}
    for case in CASES:
        if case.name in GOLDEN_CASES:
            with tempfile.TemporaryDirectory() as folder:
                found[case.name] = logits_of(make_quantized(Path(folder) / "it", case, "qwen3")[0])
    np.savez_compressed(HERE / "quantized.npz", **found)
