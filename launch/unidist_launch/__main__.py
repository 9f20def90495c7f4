"""`python -m unidist_launch` is the `unidist` command."""

from unidist_launch.cli import main

if __name__ == "__main__":
    main()
