"""Lab 03: right solutions."""
