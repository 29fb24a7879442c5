"""Runs a rung's `.cu` on the CPU: the same file, compiled by the host's C++ compiler and executed thread by thread."""

from .launcher import Launcher

__all__ = ["Launcher"]
