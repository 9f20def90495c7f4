"""Let torchvision be imported beside a PyTorch for CPUs: `python -m tools.mend_torchvision`, in an environment.

The package index has torchvision for CUDA alone. Beside a PyTorch for CPUs its library cannot be loaded, and
`import torchvision` ends in an error about operators that are not there. timm needs it, and torchmetrics, which
Lightning needs, imports it where it is installed. So the operators that it looks up are declared, as a line at the end
of its module `extension`. Calling one is still an error. Does nothing where torchvision can be imported.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

_DECLARATION = """
if not _has_ops():  # see tools/mend_torchvision.py of unidist
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")
"""


def main() -> None:
    """Mend the torchvision of this environment."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or _can_be_imported():
        return
    module = Path(found.origin).parent / "extension.py"
    module.write_text(module.read_text(encoding="utf-8") + _DECLARATION, encoding="utf-8")
    if not _can_be_imported():
        raise SystemExit(f"torchvision cannot be imported, and declaring its operators in {module} did not help")


def _can_be_imported() -> bool:
    command = [sys.executable, "-c", "import torchvision"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


if __name__ == "__main__":
    main()
