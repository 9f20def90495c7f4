DTYPES: tuple[str, ...]
REDUCE_OPS: tuple[str, ...]
EAGER_BYTES: int
SEGMENT_BYTES: int
MAX_RANKS: int
MAX_CONNECTIONS: int

Place = tuple[int, int]
Step = tuple[int, int, int, int, Place, Place, Place, int, int, int, int, int]

def plan(
    opcode: int,
    rank: int,
    size: int,
    root: int,
    count: int,
    item: int,
    counts: tuple[int, ...] | None,
    counts2: tuple[int, ...] | None,
    in_place: bool,
    /,
) -> tuple[list[Step], int]: ...
def load_tls(name: str, other_name: str, /) -> None: ...
def set_key_records(number: int, /) -> None: ...

class Tls:
    def __new__(cls, descriptor: int, is_server: bool, key: bytes) -> Tls: ...
    def handshake(self) -> int: ...

class Transport:
    def __new__(
        cls,
        rank: int,
        descriptors: tuple[tuple[int, ...], ...],
        spin_ns: int,
        heartbeat_ns: int,
        encryption: tuple[tuple[Tls, ...], ...] | None = None,
    ) -> Transport: ...
    def close(self, linger_ns: int, /) -> None: ...
    def forget(self) -> None: ...
    def num_bytes_sent(self) -> int: ...

class Operation:
    def drive(self, timeout_ns: int, /) -> int: ...
    def status(self) -> int: ...
    def missing(self) -> list[int]: ...
    def misfit(self) -> int: ...

class Group:
    def __new__(cls, transport: Transport, id: int, rank: int, members: tuple[int, ...]) -> Group: ...
    def post(
        self,
        opcode: int,
        source: int,
        target: int,
        count: int,
        dtype: int,
        redop: int,
        root: int,
        scale: float,
        counts: tuple[int, ...] | None,
        counts2: tuple[int, ...] | None,
        /,
    ) -> Operation: ...
    def cycle(
        self,
        own: int,
        everyone: int,
        stride: int,
        block: bytes,
        source: int,
        source_bytes: int,
        target: int,
        count: int,
        dtype: int,
        redop: int,
        scale: float,
        timeout_ns: int,
        /,
    ) -> bool | Operation: ...
    def message(self, is_send: bool, peer: int, address: int, nbytes: int, /) -> Operation: ...
    def failure(self) -> tuple[int, int, str] | None: ...
    def missing(self) -> list[int]: ...
    def abort(self, rank: int, reason: str, /) -> None: ...
    def close(self) -> None: ...
