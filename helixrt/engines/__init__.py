"""What computes inside a replica, behind the contract `helixrt.replica.contracts.Engine`.

`module` is the engine of any `torch.nn.Module` with any `torch.optim` optimizers.
"""
