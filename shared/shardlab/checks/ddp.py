"""Lab 03: checks of DDP without overlap."""
