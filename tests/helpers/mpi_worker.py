"""One rank of an `MpiPool`: connects to the pool, says who it is, and serves as any worker of a `RankPool`.

mpirun ... python mpi_worker.py ROOT ADDRESS
"""

from __future__ import annotations

import os
import socket
import sys

if __name__ == "__main__":
    sys.path.insert(0, sys.argv.pop(1))
    from unidist.jobs.pool import worker as runner_worker

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + sys.argv.pop(1))
    token = bytes.fromhex(os.environ.pop("UNIDIST_TEST_TOKEN"))
    connection.sendall(token + int(os.environ["OMPI_COMM_WORLD_RANK"]).to_bytes(4, "big"))
    sys.argv.append(str(connection.detach()))
    runner_worker.main()
