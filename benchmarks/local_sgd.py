"""DiLoCo beside data parallelism: bytes and time over a slow link, and the loss at the same number of samples.

The model is the character GPT of the examples, smaller. Run by `python -m benchmarks`; as a program it is one rank:

    python -m benchmarks.local_sgd RESULT STEPS STRATEGY
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.jobs import ROOT

DATA, DILOCO = "data", "local_sgd=50:outer=nesterov:outer_lr=0.7:outer_momentum=0.9:compression=bf16"
"""The strategies that are compared."""
DELAY_MS, RATE = 50.0, "100mbit"
"""What a packet takes from one host to the other, and the bits that a host sends in a second."""
LINK_STEPS, LOSS_STEPS = 100, 4000
"""Updates over the slow link, and those after which losses are compared."""
BATCH, CONTEXT, LAYERS, WIDTH, HEADS = 16, 32, 1, 32, 4
"""Windows of a rank, and characters of each; the model's size."""
LARGEST_RATE, VALIDATION = 3e-3, 64
_TIMEOUT_SEC = 900


def why_not() -> str:
    """Return why hosts with a slow link between them cannot be made here; "" if they can."""
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    import slow_link
    import ssh_hosts

    return ssh_hosts.why_not() or slow_link.why_not()


def over_slow_link(strategy: str, steps: int) -> dict[str, float]:
    """Train on two hosts, which are network namespaces of this machine; return the figures of `train` of rank 0."""
    import ssh_hosts

    with ssh_hosts.SshHosts(2, delay_ms=DELAY_MS) as hosts, tempfile.TemporaryDirectory() as folder:
        for name in hosts.names:
            hosts.narrow(name, mtu=1500, rate=RATE)
        result = Path(folder) / "result.json"
        where = ",".join(f"{address}:1" for address in hosts.addresses)
        command = [
            *(sys.executable, "-m", "unidist_launch", "launch", "-np", "2", "-H", where),
            *("--ssh-command", hosts.ssh_command, "--env", "OMP_NUM_THREADS=1"),
            *("-m", "benchmarks.local_sgd", str(result), str(steps), strategy),
        ]
        subprocess.run(command, check=True, cwd=ROOT, timeout=_TIMEOUT_SEC, env=os.environ)
        found: dict[str, float] = json.loads(result.read_text(encoding="utf-8"))
    return found


def train(strategy: str, steps: int) -> dict[str, float]:
    """Train on this rank; return its "loss" on validation data, "seconds" for an update, and "bytes" that it sent.

    Args:
        strategy: the strategy line.
        steps: updates; the learning rate rises in the first tenth, and falls to nothing.
    """
    import torch

    import unidist.torch as ud
    from unidist_local_sgd import synchronize

    sys.path.insert(0, str(ROOT / "examples" / "torch"))
    import char_gpt

    torch.set_num_threads(1)
    text = char_gpt.Text(40)
    torch.manual_seed(0)
    model: Any = char_gpt.GPT(len(text.alphabet), CONTEXT, LAYERS, WIDTH, HEADS)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LARGEST_RATE, weight_decay=0.1)
    model, optimizer = ud.distribute(model, optimizer, strategy)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda number: min((number + 1) / warm_up, 1 - number / steps)
    )
    generator = torch.Generator().manual_seed(1 + ud.rank())
    before, began = _sent_bytes(), time.monotonic()
    for _ in range(steps):
        inputs, targets = char_gpt.draw(text.train, BATCH, CONTEXT, generator)
        optimizer.zero_grad()
        char_gpt.next_character_loss(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    synchronize(optimizer)
    seconds, nbytes = (time.monotonic() - began) / steps, _sent_bytes() - before
    inputs, targets = char_gpt.draw(text.validation, VALIDATION, CONTEXT, torch.Generator().manual_seed(1000))
    with torch.no_grad():
        loss = float(char_gpt.next_character_loss(model(inputs), targets))
    return {"loss": loss, "seconds": seconds, "bytes": float(nbytes)}


def _sent_bytes() -> int:
    """Return the bytes that this network namespace has sent so far, over all but its loopback device."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    devices = {name.strip(): fields.split() for name, _, fields in (line.partition(":") for line in lines)}
    return sum(int(fields[8]) for name, fields in devices.items() if name != "lo")


def main() -> None:
    """Train, and write the figures of rank 0."""
    import unidist.torch as ud

    result, steps, strategy = sys.argv[1:]
    ud.init()
    found = train(strategy, int(steps))
    if ud.rank() == 0:
        Path(result).write_text(json.dumps(found), encoding="utf-8")
    ud.shutdown()


if __name__ == "__main__":
    main()
