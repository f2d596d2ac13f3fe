"""Lab 01: checks of model states and mixed precision."""
