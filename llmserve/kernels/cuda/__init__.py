"""CUDA kernels: checks and calls of the compiled module, one file for each group of kernels.

Every function takes the module first: on a device that which nvcc built, in tests over CPU tensors
the same sources built for the emulator. Kernels run in torch's current stream.
"""
