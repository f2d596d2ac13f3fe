"""Lab 01: wrong solutions."""
