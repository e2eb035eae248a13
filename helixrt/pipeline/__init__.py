"""Runs a schedule on one rank: channels between stages, chunks of the model, gradient buckets, the executor.

`channels` carries tensors between stages, `stage` computes one micro-batch of one chunk, `buckets` holds
the gradients, `program` is one stage's part of a schedule, `executor` works through it, `epilogue` is what
stages tell each other once a step. What is run is decided in `helixrt.schedule`, and nowhere else.
"""
