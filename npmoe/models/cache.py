"""What a model keeps of its sequences: pages of the attention layers, states of the others."""

from collections.abc import Sequence

from npmoe.config import KVCacheConfig
from npmoe.kv.states import RecurrentState, RecurrentStates
from npmoe.kv.storage import KVCache, kv_bytes_per_token
from npmoe.models.specs import DeltaNetSpec, ModelSpec
from npmoe.ops.quantize import KVPages

LayerCache = tuple[KVPages, KVPages] | RecurrentState


def token_bytes(spec: ModelSpec, config: KVCacheConfig) -> float:
    """Bytes that one token takes in the pages of all layers."""
    return spec.num_kv_layers * kv_bytes_per_token(config, spec.num_kv_heads, spec.head_dim)


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
    ) -> None:
        """num_slots: sequences that have a recurrent state, in models that keep any.

        Raises UnsupportedModel if the group size does not divide head_dim.
        """
        heads, dim = spec.num_kv_heads, spec.head_dim
        self._kv = KVCache(spec.num_kv_layers, num_pages, page_size, heads, dim, config, device)
        self.config = config
        self._states: RecurrentStates | None = None
        self.pages = self._kv.layers
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
        """Bytes of all pages and states."""
        return self._kv.nbytes + (0 if self._states is None else self._states.nbytes)

    def copy_page(self, source: int, target: int) -> None:
        """Copies one page's contents in every layer that has pages."""
        self._kv.copy_page(source, target)

    def copy_state(self, source: int, target: int) -> None:
        """Copies one slot's state in every layer that keeps one; nothing where none does."""
        if self._states is not None:
            self._states.copy(source, target)
