"""The examples' `--plot`: draws what a training run wrote down."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def save_plot(file: Path, panels: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Write a picture with a panel for each quantity, and a line for each series of it: one value per epoch.

    Args:
        file: its ending says the format (.png, .svg, .pdf).
        panels: series by name, by quantity: {"loss": {"training": [2.1, 0.4]}, "accuracy": {"test": [0.6, 0.9]}}.
    """
    import matplotlib  # here, so that training without a picture does not need it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4), layout="constrained", squeeze=False)
    for axis, (quantity, series) in zip(axes[0], panels.items(), strict=True):
        for name, values in series.items():
            axis.plot(range(1, len(values) + 1), values, marker="o", label=name)
        axis.set_xlabel("epoch")
        axis.set_ylabel(quantity)
        axis.grid(alpha=0.3)
        axis.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
