"""The errors that a user of npmoe meets; each message says what was found and what to do."""


class NpmoeError(Exception):
    """Base of every error that npmoe raises on purpose (wrong arguments are plain ValueErrors)."""


class CheckpointError(NpmoeError):
    """A checkpoint file is missing, truncated, or holds tensors that do not fit its config."""


class UnsupportedModel(NpmoeError):
    """The config, a tensor type or a file format asks for something npmoe does not implement."""


class OutOfMemory(NpmoeError):
    """The request needs more memory (or more KV pages) than there is; says what would fit."""


class TokenizerError(NpmoeError):
    """The tokenizer is missing, cannot be read, or lacks a token that is needed."""


class PromptError(NpmoeError, ValueError):
    """A prompt is empty, too long for the context, or holds token ids the model does not have."""


class NumericalError(NpmoeError):
    """A key or value is NaN or infinite; says in which layer and at which position."""

    @classmethod
    def at(cls, layer: int, position: int) -> "NumericalError":
        """Of the first layer and position; both count from 0."""
        return cls(
            f"layer {layer}: a key or value of position {position} is NaN or infinite. Earlier "
            f"layers were finite: look at the norm and the q, k and v projection of layer {layer}, "
            "at scales of weights converted with weights=..., and at the embedding if it is layer 0"
        )


class DeviceError(NpmoeError):
    """The device that was asked for is absent or cannot be used; says why."""
