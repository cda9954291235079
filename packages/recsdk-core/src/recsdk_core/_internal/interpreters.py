"""Which interpreters of a process may import the package: the main one.

The compiled part keeps its types once a process. An import in another interpreter would replace
them, and break those of the main one.
"""

from __future__ import annotations

import ctypes

__all__ = ["refuse_other_interpreters"]


def refuse_other_interpreters() -> None:
    """Raises ImportError in a sub-interpreter."""
    python = ctypes.PyDLL(None)  # not pythonapi, whose functions are shared with other code
    if not hasattr(python, "PyInterpreterState_Get"):
        return  # an application that hides Python's library
    for function in (python.PyInterpreterState_Get, python.PyInterpreterState_Main):
        function.restype = ctypes.c_void_p
    if python.PyInterpreterState_Get() != python.PyInterpreterState_Main():
        raise ImportError(
            "recsdk_core was imported in a sub-interpreter, and works in the main interpreter of "
            "a process only; import it there, or start a process (multiprocessing)"
        )
