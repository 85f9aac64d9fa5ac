"""What a bundle is; needs no torch."""
