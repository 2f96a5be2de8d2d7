"""The paged KV cache: `pages` decides which pages (plain ints), `storage` holds the arrays."""
