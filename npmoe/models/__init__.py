"""Model families as specs; their forward pass on the CPU (`layers`) and the GPU (`gpu`, `decode`);
and what brings a checkpoint into them (`stored`, `loader`)."""
