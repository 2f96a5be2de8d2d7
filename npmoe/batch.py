"""What a model is handed for one step: the tokens of several sequences, ragged, and their pages."""

from dataclasses import dataclass

from npmoe.dtypes import Array


@dataclass(frozen=True)
class Batch:
    """T tokens of S sequences; sequence s owns rows cu_seqlens_q[s] to cu_seqlens_q[s + 1].

    input_ids, positions, slot_mapping int32 `[T]`; cu_seqlens_q int32 `[S + 1]`; seq_lens int32
    `[S]` counts cached and new tokens; block_table int32 `[S, max_pages]`; logits_rows int32 `[R]`:
    the rows whose logits are wanted; rope_variant int32 `[T]` or None: the row of the frequency
    table (longrope); state_slots int32 `[S]` or None: where a sequence's recurrent states are, and
    its copies at higher precision; copy_slots int32 `[T]` or None: where a token's copies go, which
    the model fills in.
    """

    input_ids: Array
    positions: Array
    slot_mapping: Array
    cu_seqlens_q: Array
    seq_lens: Array
    block_table: Array
    logits_rows: Array
    rope_variant: Array | None = None
    state_slots: Array | None = None
    copy_slots: Array | None = None
