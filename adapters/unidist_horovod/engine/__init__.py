"""The engine `horovod`: a communicator whose collectives run in Horovod's own C++ core, and messages over Unix sockets.

May import `bindings`. Imports no framework: the launcher loads `HorovodEngine` too.
"""

from unidist_horovod.engine.engine import HorovodEngine

__all__ = ["HorovodEngine"]
