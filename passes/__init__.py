"""Graph passes: capture, split, order, cut, pair and weave the operators of a captured stage.

A pass is a function from graph to graph in its own file, with a verifier after it: `parts` holds what they hand to
each other, `nodes` what an operator is, `verify` and `agree` the rules, `aot_private` all private interfaces of torch.
Import it as `helixrt.passes`: as `passes` it would be a second copy.
"""
