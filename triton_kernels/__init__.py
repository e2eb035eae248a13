"""The copy and reduce-copy of FTAR (FT-HSDP section 4.2), each kernel beside its oracle in plain PyTorch.

`reduction` is what collectives call: torch on CPU tensors, Triton on CUDA tensors. `oracle` defines the result,
`kernels` are the Triton kernels for a small set number of thread blocks. Triton is imported when the first CUDA tensor
comes. Import it as `helixrt.triton_kernels`: other software prefers any importable `triton_kernels`.
"""
