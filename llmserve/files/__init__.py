"""Model files: finds, maps and checks them. Knows formats, not what a model computes.

Everything in a model file is untrusted: a fault becomes a StartupError, and memory stays in
proportion to the file. Imports neither torch nor transformers, so that opening a model is fast.
"""
