"""granitemoeshared: granitemoe with a shared expert on every layer."""

from npmoe.config import ConfigReader, ModelConfig, read_common
from npmoe.models import granitemoe

model_spec = granitemoe.model_spec
parameters = granitemoe.parameters


def read_config(reader: ConfigReader) -> ModelConfig:
    """The config.json of a granitemoeshared checkpoint; a width of 0 means no shared expert."""
    return read_common(
        reader,
        **granitemoe.common_fields(reader),
        shared_expert_intermediate_size=reader.take_int(
            "shared_intermediate_size", default=0, least=0
        ),
    )
