"""Language models written to be cut into pipeline stages.

`gpt` and `llama` hold the two families, `build` cuts either into stages whose parameters have the
names and the initial values of the whole model. `parallel` defines which ranks share a layer and how its parameters
lie on them; `linears` and `moe` are the layers that are shared, over the collectives and attention of `helixrt.parallel`.
"""
