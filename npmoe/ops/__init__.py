"""The steps of a forward pass, one file each: contract, NumPy definition, CPU version.

Their kernels are in cuda_src under the same stems; models/decode.py launches them.
"""
