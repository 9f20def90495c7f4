KINDS: dict[str, tuple[int, int]]
NUM_OPTIONS: int
MAX_SLOTS: int
MOST_RULES: int
MOST_SOURCES: int
BLOCK_BYTES: int
INTENT_BYTES: int

def apply(
    rule: int,
    type: int,
    values: int,
    change: int,
    slot: int,
    other_slot: int,
    num_slots: int,
    count: int,
    updates: int,
    factor: float,
    /,
) -> None: ...
def push(
    store: int,
    order: int,
    num: int,
    rules: int,
    num_rules: int,
    rule_of: int,
    present: int,
    sources: int,
    workers: int,
    factor: float,
    number: int,
    read_versions: int,
    targets: int,
    versions: int,
    /,
) -> int: ...
def step(
    store: int,
    order: int,
    num: int,
    rules: int,
    num_rules: int,
    rule_of: int,
    present: int,
    sources: int,
    workers: int,
    num_sources: int,
    factor: float,
    label: int,
    targets: int,
    versions: int,
    /,
) -> int: ...
def fetch(store: int, order: int, num: int, targets: int, versions: int, /) -> int: ...
def restore(store: int, index: int, /) -> None: ...
