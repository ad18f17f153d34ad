"""How a cell is run along time, and run fast."""

__all__: list[str] = []
