"""The fused steps: contract, NumPy twin, CPU version and launcher, one file each."""
