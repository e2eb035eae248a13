"""Room for graph passes: split, order, cut, pair and weave the operators of a captured stage. Empty so far.

A pass is a function from graph to graph in its own file, with a verifier after it.
Import it as `helixrt.passes`: as `passes` it would be a second copy.
"""
