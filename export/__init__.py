"""From a model.py to an exported program that carries its contract."""
