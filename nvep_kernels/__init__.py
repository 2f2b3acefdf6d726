"""CUDA C++ sources of nvep, package data. The same files run on GPUs (NVRTC) and on the emulated device (host C++)."""
