"""Room for networks on one machine: namespaces with rated links, a VM with Soft-RoCE NICs. Empty so far.

For tests and benchmarks that need slow, lossy or failing links; only `bench`, `cli` and tests import it.
"""
