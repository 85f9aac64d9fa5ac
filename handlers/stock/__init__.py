"""Handlers that are mctl's own: a bundle only names them."""
