"""Lab 00: right solutions."""
