"""Networks on one machine, for tests and benchmarks that need slow, lossy or failing links.

`net.Network`: hosts that are network namespaces, joined by rails with a rate, which can be slowed, cut and restored
while programs run on them; `helixrt lab net` is the same from a shell. Needs root and Linux; `machine.lacking` says
what else. `vm` and what begins with it: a small VM with the host's files and Soft-RoCE NICs (`nics`), for real RDMA
verbs on a machine that has none; `helixrt lab setup`, `run` and `shell`; `vm_setup.lacking` says what it needs. Only
`bench`, `cli`, `commands`, `doctor` and tests import this package.
"""
