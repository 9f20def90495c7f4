"""The `unidist` command, where its other modules can be imported; `python -m unidist_launch` is the same."""

import importlib
import sys


def main() -> None:
    """Run the command line, or say in one line that another distribution is in the way of `import unidist`."""
    try:
        importlib.import_module("unidist.lazy")  # which looks at the rest
    except ImportError as exc:
        sys.exit(f"unidist: error: {exc if exc.name is None else _other_package()}")
    from unidist_launch.cli import main as run

    run()


def _other_package() -> str:
    """Say that all of `unidist` is another distribution's, as it is beside an editable installation of ours."""
    import unidist

    return (
        f"`import unidist` finds {', '.join(unidist.__path__)}, which is another distribution with the same import "
        "name. Run: pip uninstall --yes unidist"
    )


if __name__ == "__main__":
    main()
