"""Time lines of accelerators: stages that put a trace's clocks right and measure it, and the tables made of it."""
