"""Runs a schedule on one rank: channels between stages, chunks of the model, gradient buckets, the executor.

`channels` carries tensors between stages, `stage` computes operations of chunks by autograd, `graph_stage` by graphs of
F, B and W and woven pairs, `buckets` holds the gradients, `program` is one stage's part of a schedule, `executor` works
through it and `operation_times` has when, `epilogue` is what stages tell each other once a step. A model that is one stage
trains by `single_stage`, in `strands`. What is run is decided in `helixrt.schedule`, and nowhere else.
"""
