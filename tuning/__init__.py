"""Which compiled code is fastest where, and bundles that are written only after they passed parity."""
