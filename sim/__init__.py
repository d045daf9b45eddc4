"""The simulator: the engine's own scheduler on a clock, with an executor that predicts. Never imports torch."""
