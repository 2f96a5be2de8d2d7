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


class DeviceError(NpmoeError):
    """The device that was asked for is absent or cannot be used; says why."""
