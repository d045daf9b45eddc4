"""Operations of the network: one file each, with its contract, its checks and its torch reference."""
