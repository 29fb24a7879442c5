"""The CPU back end: compiles the same `.cu` with the host's C++ compiler and runs it thread by thread."""

from .launcher import Launcher

__all__ = ["Launcher"]
