"""Lab 01: right solutions."""
