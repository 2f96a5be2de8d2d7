"""Checkpoints that others have quantised: what their configs say and how their matrices lie."""
