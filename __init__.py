"""mctl: take a PyTorch model from its source file to a file that can be trusted and a server that can be run."""

__version__ = "0.1.0"
