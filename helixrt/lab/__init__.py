"""Networks on one machine, for tests and benchmarks that need slow, lossy or failing links.

`net.Network`: hosts that are network namespaces, joined by rails with a rate, which can be slowed, cut and restored
while programs run on them; `helixrt lab net` is the same from a shell. Needs root and Linux; `machine.lacking` says
what else. Only `bench`, `cli`, `commands`, `doctor` and tests import this package.
"""
