"""What arrives: prompt files and built-in tasks, for the engine and the simulator alike. No torch."""
