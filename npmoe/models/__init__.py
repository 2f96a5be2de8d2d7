"""Model families as specs over shared layers, and the loader that fills them with weights."""
