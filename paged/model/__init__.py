"""The network: its layers, the decoder made of them, and the reading of checkpoints."""
