"""From an expert function to ops in the graph."""
