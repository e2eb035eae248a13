"""The data plane: a C++ library that carries out the plans of collectives, and its Python interface.

`include/helixrt_native.h` is the library's ABI, `src/` its sources. `build` compiles it, `library` loads it, `flat` turns plans
into what it reads, and `Engine` (in `engine`) is what other parts of helixrt use. Importing this package compiles and loads
nothing: that happens when the first `Engine` is made.
"""
