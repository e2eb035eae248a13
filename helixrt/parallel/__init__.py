"""What the layers of a model call where several ranks share it: collectives with gradients, and attention over context ranks.

The built-in models and captured transformers models use it, and models in stages of your own may.
"""

CONTEXTS = ("gathered", "ring")  # how context ranks get each other's keys and values, see `attention`
