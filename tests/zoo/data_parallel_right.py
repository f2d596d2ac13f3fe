"""Lab 02: right solutions."""
