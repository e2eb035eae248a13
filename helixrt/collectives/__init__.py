"""Exchanges among the equal ranks of the replicas that take part in a step.

`exchange` holds the contract: flat tensors are summed over replicas out of place, so that a broken
exchange can be tried again with the survivors. May stand on `transport/`, `protocol/` and
`triton_kernels/`; knows nothing of pipelines or of a replica's life.
"""
