"""Room for reduce and copy kernels, each beside a plain PyTorch oracle. Empty so far.

Import it as `helixrt.triton_kernels`: other software prefers any importable `triton_kernels`.
"""
