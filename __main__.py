"""`python -m mctl` is the `mctl` command."""

from .cli.main import main

if __name__ == "__main__":
    main()
