"""mistral: llama with a sliding window on every layer."""

from npmoe.config import ConfigReader, ModelConfig, read_common, read_rope, read_window
from npmoe.models import llama

model_spec = llama.model_spec
parameters = llama.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a mistral checkpoint."""
    reader.expect("partial_rotary_factor", 1, 1.0)
    return read_common(
        reader,
        intermediate_size=reader.take_int("intermediate_size"),
        rms_norm_eps=reader.take_number("rms_norm_eps", default=1e-6),
        rope=read_rope(reader),
        layer_windows=(read_window(reader, absent=4096),) * reader.take_int("num_hidden_layers"),
    )
