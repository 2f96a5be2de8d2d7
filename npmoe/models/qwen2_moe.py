"""qwen2_moe: qwen2 with routed experts and one shared expert behind a sigmoid gate."""

from npmoe.config import ConfigReader, ModelConfig, read_common, read_layer_windows
from npmoe.models import qwen2, qwen3, qwen3_moe
from npmoe.models.parameters import Parameter, TensorNames, decoder_parameters
from npmoe.models.specs import ModelSpec

model_spec = qwen2.model_spec


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a qwen2_moe checkpoint, hub or transformers v5 spelling."""
    fields = qwen3.common_fields(reader)
    fields["attention_bias"] = bool(reader.take("qkv_bias", default=True))
    return read_common(
        reader,
        **fields,
        **qwen3_moe.expert_fields(reader),
        layer_windows=_layer_windows(reader),
        shared_expert_intermediate_size=reader.take_int("shared_expert_intermediate_size"),
        shared_expert_gate=True,
    )


def _layer_windows(reader: ConfigReader) -> tuple[int | None, ...]:
    """The active window on every other layer before `max_window_layers`, or by `layer_types`."""
    window = qwen3.active_window(reader)
    stop = reader.take_int("max_window_layers", default=28, least=0)
    types = [
        "sliding_attention" if i % 2 == 0 and i < stop and window else "full_attention"
        for i in range(reader.take_int("num_hidden_layers"))
    ]
    return read_layer_windows(reader, window, types)


def parameters(config: ModelConfig, spec: ModelSpec) -> list[Parameter]:
    """Checkpoint names."""
    return decoder_parameters(spec, TensorNames(shared="shared_expert"))
