"""Every collective from send and recv alone: naive, ring, tree and butterfly all-reduce, and the rest.

An engine that can only send and receive subclasses `PointToPointCommunicator` and is complete.
`AlgorithmCommunicator` puts one of the all-reduce `ALGORITHMS` in front of any engine
(`--allreduce-algorithm`). Importing this package imports neither numpy nor any framework.
"""

from __future__ import annotations

from unidist.algorithms.allreduce import ALGORITHMS, Algorithm
from unidist.algorithms.point_to_point import PointToPointCommunicator
from unidist.algorithms.selected import AlgorithmCommunicator

__all__ = ["ALGORITHMS", "Algorithm", "AlgorithmCommunicator", "PointToPointCommunicator"]
