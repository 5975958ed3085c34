"""Ahead-of-time compilation of every Triton kernel for GPUs that this machine need not have.

``python -m epdserve.kernels.aot`` prints the table; see ``catalogue.py`` for what is compiled.
"""
