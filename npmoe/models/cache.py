"""What a model keeps of its sequences: pages of the attention layers, states of the others."""

from collections.abc import Sequence
from dataclasses import replace

from npmoe.batch import Batch
from npmoe.config import EngineConfig, KVCacheConfig, KVWindows
from npmoe.kv.states import RecurrentState, RecurrentStates
from npmoe.kv.storage import KVCache, kv_bytes_per_token
from npmoe.models.specs import DeltaNetSpec, ModelSpec
from npmoe.ops.quantize import KVCopies, KVPages

LayerCache = tuple[KVPages, KVPages] | RecurrentState


def token_bytes(spec: ModelSpec, config: KVCacheConfig) -> float:
    """Bytes that one token takes in the pages of all layers."""
    return spec.num_kv_layers * kv_bytes_per_token(config, spec.num_kv_heads, spec.head_dim)


def copies_config(config: KVCacheConfig, windows: KVWindows) -> KVCacheConfig:
    """Of the pages of copies in a cache with windows."""
    name = windows.format
    return replace(config, key_format=name, value_format=name, windows=None)


def window_bytes(spec: ModelSpec, config: KVCacheConfig, prefill_chunk: int) -> float:
    """Bytes of the copies that one sequence has in the windows of all layers; 0 without windows."""
    windows = config.windows
    if windows is None:
        return 0
    return windows.tokens(prefill_chunk) * token_bytes(spec, copies_config(config, windows))


def sequence_bytes(spec: ModelSpec, config: KVCacheConfig, prefill_chunk: int) -> float:
    """Bytes that one sequence takes beside its pages: recurrent states, and copies in windows."""
    return spec.state_bytes + window_bytes(spec, config, prefill_chunk)


def num_state_slots(max_num_seqs: int) -> int:
    """Slots for the sequences that run at once, and one for a sequence outside the queues."""
    return max_num_seqs + 1


class ModelCache:
    """`layers[i]` is (K pages, V pages) of layer i, or its recurrent states; `pages` has the former
    alone."""

    def __init__(
        self,
        spec: ModelSpec,
        num_pages: int,
        page_size: int,
        config: KVCacheConfig,
        num_slots: int = 1,
        device: str = "cpu",
        prefill_chunk: int = EngineConfig.prefill_chunk,
    ) -> None:
        """num_slots: sequences that have a recurrent state, in models that keep any, and copies, in
        caches with windows. prefill_chunk: most tokens of a sequence in one batch.

        Raises UnsupportedModel if the group size does not divide head_dim.
        """
        heads, dim = spec.num_kv_heads, spec.head_dim
        self._kv = KVCache(spec.num_kv_layers, num_pages, page_size, heads, dim, config, device)
        self.config = config
        self._states: RecurrentStates | None = None
        self.pages = self._kv.layers
        self._copies: KVCache | None = None
        windows = config.windows
        if windows is not None:
            sizes = num_slots, windows.tokens(prefill_chunk), heads, dim
            self._copies = KVCache(
                spec.num_kv_layers, *sizes, copies_config(config, windows), device
            )
            self.pages = [
                (_with_copies(k, k_copies, windows), _with_copies(v, v_copies, windows))
                for (k, v), (k_copies, v_copies) in zip(
                    self.pages, self._copies.layers, strict=True
                )
            ]
        self.layers: Sequence[LayerCache] = self.pages
        delta = spec.delta_net
        if delta is not None:
            count = len(spec.layers) - spec.num_kv_layers
            shapes = delta.conv_state_shape, delta.memory_shape
            self._states = RecurrentStates(count, num_slots, *shapes)
            pages, states = iter(self.pages), iter(self._states.layers)
            self.layers = [
                next(states) if isinstance(layer.attention, DeltaNetSpec) else next(pages)
                for layer in spec.layers
            ]

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, states and copies."""
        return self._kv.nbytes + sum(
            a.nbytes for a in (self._states, self._copies) if a is not None
        )

    @property
    def has_slots(self) -> bool:
        """Whether a sequence has a state slot beside its pages."""
        return self._states is not None or self._copies is not None

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page's contents in every layer that has pages."""
        self._kv.copy_page(source, target)

    def copy_state(self, source: int, target: int) -> None:
        """Copies what one slot holds, states and copies, in every layer; nothing where there is
        nothing."""
        if self._states is not None:
            self._states.copy(source, target)
        if self._copies is not None:
            self._copies.copy_page(source, target)


def _with_copies(pages: KVPages, copies: KVPages, windows: KVWindows) -> KVPages:
    return replace(pages, copies=KVCopies(copies, windows.first, windows.recent))


def with_copy_slots(batch: Batch, cache: Sequence[LayerCache]) -> Batch:
    """The batch with the slots of its tokens' copies, the same in every layer; as it is where the
    cache has no windows."""
    keys = next(layer[0] for layer in cache if not isinstance(layer, RecurrentState))
    if keys.copies is None:
        return batch
    assert batch.state_slots is not None, "a cache with windows needs state slots"
    slots = keys.copies.slots(batch.positions, batch.cu_seqlens_q, batch.state_slots)
    return replace(batch, copy_slots=slots)
