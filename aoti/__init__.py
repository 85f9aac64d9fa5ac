"""From an exported program to compiled variants."""
