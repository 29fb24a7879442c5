"""Runs a rung's ``.cu`` on the CPU: the same file, compiled by the host's C++ compiler and executed thread by thread.

``load`` gives a Launcher with the signature of the CUDA back end's; ``traffic`` counts what a kernel asks of memory.
"""

from .launcher import Launcher, load, traffic

__all__ = ["Launcher", "load", "traffic"]
