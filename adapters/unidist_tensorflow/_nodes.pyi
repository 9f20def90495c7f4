from collections.abc import Callable

DTYPES: tuple[str, ...]
NOT_READY: int
WRITE: int
ADD: int

def register_nodes(library: str, bucket_full: Callable[[int], None], /) -> None: ...
